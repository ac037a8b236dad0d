"""What a simulated round looks like: the times of its tasks, what each started after, and what is left for the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from specstream.round_plan import Lane


class Why(str, Enum):
    """What a task's start had to wait for last."""

    LANE = "lane"
    """The task before it on its lane."""
    WAIT = "waits for"
    """A task on another lane."""
    HOST = "host"
    """The launch of its round, which the end of the round before allows."""


class Span(NamedTuple):
    """A task on its lane, in microseconds from the start of its round."""

    lane: Lane
    task: str
    start_us: float
    stop_us: float
    idle_us: float
    """How long the lane stood still before it, maybe since the round before."""
    why: Why
    cause: str
    """The task that it started right after; none in the first round's beginning."""
    earlier: bool
    """Whether that is a task of an earlier round."""


@dataclass(frozen=True)
class Left:
    """What a round leaves behind for the next one to wait for."""

    ends: Mapping[str, float]
    """By task, in us from the start of the round."""
    last: Mapping[Lane, str]
    """The last task on each lane."""
    ahead: tuple[str, ...]
    """Fetches of the next round, in its order."""
    awaited: tuple[str, ...]
    """What the host waits for before it launches the next round."""

    @property
    def ended_by(self) -> str:
        """The task that the round ends with."""
        return max(self.awaited, key=self.ends.__getitem__, default="")

    def next_start_us(self, host_gap_us: float) -> float:
        """When the next round starts."""
        return self.ends[self.ended_by] + host_gap_us if self.awaited else 0.0


Times = list[tuple[float, float]]
"""Starts and stops, in us."""


@dataclass(frozen=True)
class Timeline:
    """The spans of one round in launch order."""

    spans: tuple[Span, ...]
    left: Left
    period_us: float
    """From the start of the round to the start of the next one."""
    repeats: bool = False
    """Whether the rounds before and after it are exactly like it."""

    @cached_property
    def by_task(self) -> dict[str, Span]:
        return {span.task: span for span in self.spans}

    def busy_us(self, lane: Lane) -> float:
        return sum(s.stop_us - s.start_us for s in self.spans if s.lane is lane)

    def times(self, lane: Lane) -> Times:
        """When the lane is busy, in order; if the round repeats, with the times of the round before it."""
        times = [(s.start_us, s.stop_us) for s in self.spans if s.lane is lane]
        before = [(start - self.period_us, stop - self.period_us) for start, stop in times] if self.repeats else []
        return before + times
