"""A shared plan as it runs in one round: the steps of the canonical form, on the round's own chunks."""

from __future__ import annotations

from specstream.round_graph import RoundGraph, TaskKind
from specstream.round_plan import Plan, StepOp


def bind(plan: Plan, round_graph: RoundGraph) -> Plan:
    """The steps of `plan` with the tasks of a round of the same canonical form.

    What a round has no chunk to write out for is no task of it, and its steps fall away.

    Args:
        plan: made for `round_graph.spec.canonical()`.
        round_graph: of the round itself.
    """
    tasks = round_graph.tasks
    known = {task.name for task in tasks}
    missing = {task.name for task in plan.tasks if task.name not in known}
    if not all(plan.by_name[name].kind is TaskKind.OFFLOAD for name in missing):
        raise ValueError(f"the round has no {', '.join(sorted(missing))}")
    steps = tuple(step for step in plan.steps if step.op is StepOp.SYNC or step.name in known)
    return Plan(round_graph.spec, tasks, steps)
