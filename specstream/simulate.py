"""Plan -> timeline: when each task would run, from predicted durations, and where the target waits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from specstream.plan import Lane, Plan, StepOp


@dataclass(frozen=True)
class Span:
    """A task on its lane, in microseconds from the start of the round."""

    lane: Lane
    task: str
    start_us: float
    stop_us: float
    waited_us: float = 0.0
    """How long the lane stood still before it."""
    cause: str = ""
    """The task it waited for last."""


@dataclass(frozen=True)
class Timeline:
    """The spans of one round in launch order."""

    spans: tuple[Span, ...]

    @property
    def round_us(self) -> float:
        """From the first launch to the end of the last task that belongs to the round."""
        return max((s.stop_us for s in self.spans if not s.task.startswith("ahead/")), default=0.0)

    def busy_us(self, lane: Lane) -> float:
        return sum(s.stop_us - s.start_us for s in self.spans if s.lane is lane)

    def bubbles(self) -> list[Span]:
        """Spans of the target that had to wait, longest wait first."""
        waits = [s for s in self.spans if s.lane is Lane.TARGET and s.waited_us > 0]
        return sorted(waits, key=lambda s: -s.waited_us)


def simulate(plan: Plan) -> Timeline:
    """Runs a plan in the model where lanes run in order, waits hold them, and launching costs nothing.

    Fetches of the round before are taken as done at the start.
    """
    free: dict[Lane, float] = defaultdict(float)
    held: dict[Lane, tuple[float, str]] = {}
    finished: dict[str, float] = {task.name: 0.0 for task in plan.tasks if task.phase == "before"}
    spans: list[Span] = []
    for step in plan.steps:
        if step.op is StepOp.WAIT:
            until = finished[step.name]
            if until > held.get(step.lane, (0.0, ""))[0]:
                held[step.lane] = (until, step.name)
        elif step.op is StepOp.LAUNCH:
            until, cause = held.pop(step.lane, (0.0, ""))
            start = max(free[step.lane], until)
            waited = max(0.0, until - free[step.lane])
            stop = start + plan.by_name[step.name].cost_us
            spans.append(Span(step.lane, step.name, start, stop, waited, cause if waited else ""))
            free[step.lane] = finished[step.name] = stop
    return Timeline(tuple(spans))
