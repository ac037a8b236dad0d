"""What bounds a round: what most of its critical path is spent on."""

from __future__ import annotations

from typing import Literal

from specstream.cost import DeviceProfile
from specstream.critical_path import critical_path
from specstream.round_graph import TaskKind
from specstream.round_plan import Plan
from specstream.timeline import Timeline

Bound = Literal["link", "device memory", "compute", "host"]
"""host: the fixed costs of launching tasks."""


def bound_by(plan: Plan, timeline: Timeline, profile: DeviceProfile) -> Bound:
    """What most of a round's critical path is spent on."""
    us: dict[Bound, float] = {}
    for step in critical_path(timeline).steps:
        task = plan.by_name[step.task]
        fixed = min(step.task_us, task.launches * profile.launch_us)
        kind: Bound = "device memory"
        if task.kind in (TaskKind.FETCH, TaskKind.OFFLOAD):
            kind = "link"
        elif task.flops / profile.flops_per_us > task.memory_bytes / profile.memory_bytes_per_us:
            kind = "compute"
        us["host"] = us.get("host", 0.0) + fixed + step.waited_us
        us[kind] = us.get(kind, 0.0) + step.task_us - fixed
    return max(us, key=us.__getitem__)
