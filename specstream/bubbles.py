"""Bubbles: where a lane stands still because its next task has to wait, and what that comes from."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.round_plan import Lane
from specstream.timeline import Span, Timeline, Why


@dataclass(frozen=True)
class BusyRun:
    """Tasks that ran one right after the other on a lane, and why the first of them did not start before it did."""

    lane: Lane
    first: str
    last: str
    why: Why
    """LANE: the lane was busy with the round before."""
    cause: str
    earlier: bool

    def __str__(self) -> str:
        match self.why:
            case Why.WAIT:
                since = f"{self.first}, which waits for {_named(self.cause, self.earlier)}"
            case Why.HOST:
                since = f"{self.first}, with which it begins the round"
            case _:
                since = "the round before"
        return f"{self.lane.value} busy since {since}"


@dataclass(frozen=True)
class Bubble:
    """A time in which a lane stands still."""

    lane: Lane
    start_us: float
    """From the start of the round; negative if it stands still since the round before."""
    duration_us: float
    task: str
    """What waits."""
    why: Why
    """WAIT, or HOST if it is the launch of the round that it waits for."""
    cause: str
    """The task it waits for last."""
    earlier: bool
    """Whether that is a task of the round before."""
    chain: tuple[BusyRun, ...]
    """Why the cause was no earlier, from it backwards, as far as a launch, this lane, or the round before."""

    @property
    def stop_us(self) -> float:
        return self.start_us + self.duration_us

    def __str__(self) -> str:
        cause = _named(self.cause, self.earlier) if self.cause else "the launch"
        return ": ".join([f"{self.duration_us:.0f} us before {self.task}, for {cause}", *map(str, self.chain)])


def bubbles(timeline: Timeline, lane: Lane = Lane.TARGET) -> tuple[Bubble, ...]:
    """The bubbles of a lane, in order of time.

    Of a round that repeats, they and what the lane does add up to the period: the time after the lane's last task is
    part of the next round's first bubble.
    """
    heads = _heads(timeline)
    result = []
    for span in timeline.spans:
        if span.lane is lane and span.idle_us > 0:
            chain = _chain(span, heads, timeline.repeats)
            start = span.start_us - span.idle_us
            result.append(Bubble(lane, start, span.idle_us, span.task, span.why, span.cause, span.earlier, chain))
    return tuple(result)


def _heads(timeline: Timeline) -> dict[str, Span]:
    """For each task the first one of its unbroken run of tasks on its lane."""
    heads: dict[str, Span] = {}
    for span in timeline.spans:
        unbroken = span.why is Why.LANE and not span.earlier
        heads[span.task] = heads[span.cause] if unbroken else span
    return heads


def _chain(waiting: Span, heads: dict[str, Span], repeats: bool) -> tuple[BusyRun, ...]:
    chain: list[BusyRun] = []
    span = waiting
    while span.cause and (not span.earlier or (repeats and span is waiting)):
        head = heads[span.cause]
        if head.lane is waiting.lane:
            break
        chain.append(BusyRun(head.lane, head.task, span.cause, head.why, head.cause, head.earlier))
        span = head
    return tuple(chain)


def _named(task: str, earlier: bool) -> str:
    return f"{task} of the round before" if earlier else task
