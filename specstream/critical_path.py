"""The critical path: the chain of tasks, each started by the end of the one before it, that a round lasts as long as.

Of a round that repeats it is a cycle: followed back from the end of the round, into the rounds before, it comes back to
where it was, a period earlier. The round is no shorter if any task that is not on it takes less time. Of a single round
it is the chain from its start to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from specstream.round_plan import Lane
from specstream.timeline import Span, Timeline, Why


@dataclass(frozen=True)
class CriticalStep:
    """A task on the critical path, which starts when the step before it ends."""

    task: str
    lane: Lane
    why: Why
    """What connects it with the step before it."""
    waited_us: float
    """What the host takes between the two; on a single round's first step, the work of rounds before."""
    task_us: float


@dataclass(frozen=True)
class CriticalPath:
    """Its steps, in order of time."""

    steps: tuple[CriticalStep, ...]
    rounds: int
    """How many rounds it takes to come round; hardly ever more than one."""

    @property
    def total_us(self) -> float:
        """`rounds` times the period; of a single round, from its start to its end."""
        return sum(step.waited_us + step.task_us for step in self.steps)

    def share(self, lane: Lane) -> float:
        """How much of the path the tasks of a lane make up, between 0 and 1."""
        total = self.total_us
        return sum(step.task_us for step in self.steps if step.lane is lane) / total if total else 0.0


def critical_path(timeline: Timeline) -> CriticalPath:
    """The critical path of a round, best of one in steady state."""
    path: list[Span] = []
    place: dict[str, int] = {}
    """Where on the path a task is."""
    name = timeline.left.ended_by
    while name and name not in place:
        place[name] = len(path)
        path.append(span := timeline.by_task[name])
        name = "" if span.earlier and not timeline.repeats else span.cause
    if name:
        path = path[place[name] :]
    rounds = sum(span.earlier for span in path) if timeline.repeats else 1
    return CriticalPath(tuple(_step(timeline, span) for span in reversed(path)), rounds)


def _step(timeline: Timeline, span: Span) -> CriticalStep:
    waited = 0.0
    if not timeline.repeats and (span.earlier or not span.cause):
        waited = span.start_us
    elif timeline.repeats and span.why is Why.HOST:
        waited = timeline.period_us - timeline.by_task[span.cause].stop_us
    return CriticalStep(span.task, span.lane, span.why, waited, span.stop_us - span.start_us)
