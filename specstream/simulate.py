"""Plans -> timelines: when each task of rounds that follow one another would run, from predicted durations.

In this model lanes run in order, waits hold them, and launching costs nothing. The host launches a whole round at once,
when the lanes that the round before ends with (its SYNC steps) are empty; the link goes on from where it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from specstream.errors import InvalidPlan
from specstream.round_plan import Lane, Plan, StepOp
from specstream.timeline import Left, Span, Timeline, Why


def simulate(plans: Iterable[Plan], host_gap_us: float = 0.0) -> list[Timeline]:
    """Runs rounds one after the other, the first one on idle lanes, with its fetches in flight done at the start.

    Args:
        plans: each counts on fetches that the one before it leaves in flight.
        host_gap_us: what the host needs between the end of a round and the launch of the next.

    Raises:
        InvalidPlan: a plan counts on more fetches than the one before it leaves.
    """
    timelines: list[Timeline] = []
    for plan in plans:
        timelines.append(run_round(plan, timelines[-1].left if timelines else None, host_gap_us))
    return timelines


def run_round(plan: Plan, before: Left | None, host_gap_us: float) -> Timeline:
    """One round after what the round before has left."""
    machine = _Machine()
    machine.enter(plan, before, host_gap_us)
    ends, ready, stopped, tasks = machine.ends, machine.ready, machine.stopped, plan.by_name
    spans: list[Span] = []
    awaited: list[str] = []
    for op, lane, name in plan.steps:
        if op is StepOp.WAIT:
            if ends[name] > ready[lane].us:
                known_as = machine.known_as.get(name, name)
                ready[lane] = _Ready(ends[name], Why.WAIT, known_as, known_as != name)
        elif op is StepOp.LAUNCH:
            start, why, cause, earlier = ready[lane]
            stop = start + tasks[name].cost_us
            spans.append(Span(lane, name, start, stop, start - stopped[lane], why, cause, earlier))
            ends[name] = stopped[lane] = stop
            ready[lane] = _Ready(stop, Why.LANE, name, False)
            machine.last[lane] = name
        elif op is StepOp.SYNC and ready[lane].cause and not ready[lane].earlier:
            awaited.append(ready[lane].cause)
    ahead = tuple(task.name for task in plan.tasks if task.phase == "ahead")
    kept = {name: ends[name] for name in (*machine.last.values(), *ahead, *awaited)}
    left = Left(kept, machine.last, ahead, tuple(awaited))
    return Timeline(tuple(spans), left, left.next_start_us(host_gap_us))


class _Ready(NamedTuple):
    """When a lane's next task can start, and what it started after then."""

    us: float
    why: Why
    cause: str
    earlier: bool


@dataclass
class _Machine:
    """Lanes and events while a round is run."""

    ends: dict[str, float] = field(default_factory=dict)
    known_as: dict[str, str] = field(default_factory=dict)
    """Fetches in flight at the start: what the round before calls them."""
    ready: dict[Lane, _Ready] = field(default_factory=lambda: dict.fromkeys(Lane, _Ready(0.0, Why.HOST, "", False)))
    stopped: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    last: dict[Lane, str] = field(default_factory=dict)

    def enter(self, plan: Plan, before: Left | None, host_gap_us: float) -> None:
        """Brings in what the round before has left, in us from the start of this one."""
        in_flight = [task.name for task in plan.tasks if task.phase == "before"]
        if before is None:
            self.ends = dict.fromkeys(in_flight, 0.0)
            return
        if len(in_flight) > len(before.ahead):
            ahead = len(before.ahead)
            raise InvalidPlan(f"the plan counts on {len(in_flight)} fetches in flight; the round before leaves {ahead}")
        start = before.next_start_us(host_gap_us)
        self.known_as = dict(zip(in_flight, before.ahead, strict=False))
        self.ends = {name: before.ends[ahead] - start for name, ahead in self.known_as.items()}
        self.ready = dict.fromkeys(Lane, _Ready(0.0, Why.HOST, before.ended_by, True))
        for lane, name in before.last.items():
            self.last[lane] = name
            self.ends[name] = self.stopped[lane] = stop = before.ends[name] - start
            if stop > 0:
                self.ready[lane] = _Ready(stop, Why.LANE, name, True)
