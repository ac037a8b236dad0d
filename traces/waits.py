"""Where the target's lane stands still in a round, planned or measured, and how much of that is for the draft."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specstream.traces.records import MeasuredSpan, PlannedRound, PlannedTask, RecordedRound

TARGET, DRAFT = "target", "draft"
"""Names of lanes."""
ROUNDING_US = 1e-3
Interval = tuple[float, float]
"""Start and stop, in us from the start of the round."""


@dataclass(frozen=True)
class Wait:
    """A time in which the target's lane stands still."""

    start_us: float
    stop_us: float
    task: str
    """What waits."""
    text: str
    for_draft: bool
    """Whether it is the draft that the task waits for, directly or through the link."""

    @property
    def duration_us(self) -> float:
        return self.stop_us - self.start_us


def tasks_of(plan: PlannedRound) -> dict[str, PlannedTask]:
    """The plan's tasks by name. What was in flight when the round began is found under its own name too.

    A plan lists such a fetch once, as the round before names it: "ahead/..." in place of "fetch/...".
    """
    named = {task.name: task for task in plan.tasks}
    ahead = {name.replace("ahead/", "fetch/", 1): task for name, task in named.items() if name.startswith("ahead/")}
    return ahead | named


def waits_for_draft(task: PlannedTask, tasks: Mapping[str, PlannedTask]) -> bool:
    """Whether the causes of a task's start lead to the draft before they lead back to the task's own lane."""
    seen = {task.name}
    cause = tasks.get(task.cause)
    while cause is not None and cause.name not in seen and cause.lane != task.lane:
        if cause.lane == DRAFT:
            return True
        seen.add(cause.name)
        cause = tasks.get(cause.cause)
    return False


def planned_waits(plan: PlannedRound) -> list[Wait]:
    """The plan's bubbles, in order. One that began in the round before stands where it is in the next one too.

    A round repeats: what is before its start is cut off there and put at the end.
    """
    tasks = tasks_of(plan)
    waiting = sorted((t for t in plan.tasks if t.lane == TARGET and t.idle_us > 0), key=lambda t: t.start_us)
    starts = [task.start_us for task in waiting]
    waits = []
    for bubble in plan.bubbles:
        stop = bubble.start_us + bubble.duration_us
        at = bisect_left(starts, stop - ROUNDING_US)  # its task starts where it stops
        task = waiting[at] if at < len(waiting) else None
        name, for_draft = (task.name, waits_for_draft(task, tasks)) if task else ("", False)
        for start, end in _within_period((bubble.start_us, stop), plan.period_us):
            waits.append(Wait(start, end, name, bubble.text, for_draft))
    return sorted(waits, key=lambda wait: wait.start_us)


def measured_waits(recorded: RecordedRound, plan: PlannedRound) -> list[Wait]:
    """The gaps between the target's tasks as they ran, from the round's start to its end.

    What was waited for is not measured. It is taken to be what ended last on another lane during the gap, and what
    that waited for to be what the plan says.
    """
    tasks = tasks_of(plan)
    spans = sorted((s for s in recorded.spans if lane_of(s, tasks) == TARGET), key=lambda span: span.start_us)
    if not spans:
        return []
    others = _Ends((s for s in recorded.spans if lane_of(s, tasks) != TARGET), tasks)
    waits, done = [], 0.0
    for span in spans:
        if span.start_us > done:
            waits.append(others.wait(done, span.start_us, span.task, f"before {span.task}"))
        done = max(done, span.stop_us)
    if done < recorded.duration_us:
        first = next(task.name for task in plan.tasks if task.lane == TARGET)
        waits.append(others.wait(done, recorded.duration_us, first, "at the end of the round"))
    return waits


class _Ends:
    """When tasks ended that may have been waited for."""

    def __init__(self, spans: Iterable[MeasuredSpan], tasks: Mapping[str, PlannedTask]) -> None:
        self._tasks = tasks
        # of those that end together a draft step comes first: it is not the only one that was waited for
        ends = sorted((s.stop_us, tasks[s.task].lane != DRAFT, s.task) for s in spans)
        self._stops, self._names = [end[0] for end in ends], [end[2] for end in ends]

    def wait(self, start: float, stop: float, task: str, where: str) -> Wait:
        last = bisect_right(self._stops, stop + ROUNDING_US) - 1
        text = f"{stop - start:.0f} us {where}"
        if last < 0 or self._stops[last] <= start:
            return Wait(start, stop, task, text, False)
        cause = self._tasks[self._names[last]]
        for_draft = cause.lane == DRAFT or waits_for_draft(cause, self._tasks)
        return Wait(start, stop, task, f"{text}, right after {self._names[last]}", for_draft)


def lane_of(span: MeasuredSpan, tasks: Mapping[str, PlannedTask]) -> str:
    """The lane of a measured task.

    Raises:
        ValueError: the plan has no task of that name.
    """
    if span.task not in tasks:
        raise ValueError(f"a round has a task {span.task!r}, which is not in its plan: the run's files do not fit")
    return tasks[span.task].lane


def exposed_draft(drafting: Iterable[Interval], waits: Iterable[Wait]) -> list[Interval]:
    """When a draft step runs and the target stands still for the draft. Each list is in order, without overlaps."""
    exposed, awaited = [], [(wait.start_us, wait.stop_us) for wait in waits if wait.for_draft]
    for start, stop in drafting:
        shared = ((max(start, begin), min(stop, end)) for begin, end in awaited)
        exposed += [(begin, end) for begin, end in shared if begin < end]
    return exposed


def planned_drafting(plan: PlannedRound) -> list[Interval]:
    """When the draft works, in a round that repeats: what is beyond its end is put at its beginning."""
    times = [(task.start_us, task.stop_us) for task in plan.tasks if task.lane == DRAFT]
    return sorted(part for time in times for part in _within_period(time, plan.period_us))


def measured_drafting(recorded: RecordedRound, plan: PlannedRound) -> list[Interval]:
    """When the draft worked, from the round's start to its end."""
    tasks = tasks_of(plan)
    times = ((s.start_us, s.stop_us) for s in recorded.spans if lane_of(s, tasks) == DRAFT)
    return sorted(part for time in times for part in clipped(time, recorded.duration_us))


def clipped(time: Interval, duration_us: float) -> list[Interval]:
    """What of it is in the round: one interval, or none."""
    start, stop = max(0.0, time[0]), min(duration_us, time[1])
    return [(start, stop)] if start < stop else []


def _within_period(time: Interval, period_us: float) -> list[Interval]:
    moved = ((time[0] + by, time[1] + by) for by in (-period_us, 0.0, period_us))
    return [part for each in moved for part in clipped(each, period_us)]
