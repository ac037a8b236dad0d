"""What tasks cost a round: how much shorter it would be if they took no time. The rest of their time is hidden.

That depends on the whole round, not on what happens to run beside them: a draft that runs while the link is busy is
exposed if the link then has to wait for it, and two kinds of tasks may each be hidden behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specstream.round_graph import Task, TaskKind
from specstream.round_plan import Lane, Plan, lane_of
from specstream.steady import steady_round
from specstream.timeline import Timeline, Times

Tasks = Lane | TaskKind
"""The tasks on a lane, or of a kind."""


@dataclass(frozen=True)
class Exposure:
    """The time of some of a round's tasks."""

    busy_us: float
    """What they last, all together."""
    exposed_us: float
    """By how much the period would be shorter if they took no time."""
    beside_link_us: float
    """For how long they run while the link is busy."""
    timeline: Timeline
    """Of the round as it is."""

    @property
    def hidden_us(self) -> float:
        return self.busy_us - self.exposed_us

    @property
    def hidden_share(self) -> float:
        """Between 0 and 1; of tasks that take no time, 1."""
        return self.hidden_us / self.busy_us if self.busy_us else 1.0


def exposure(plan: Plan, tasks: Tasks, host_gap_us: float = 0.0) -> Exposure:
    """What the tasks on a lane, or of a kind, cost a round of this plan in steady state."""
    timeline = steady_round(plan, host_gap_us)
    without = steady_round(without_cost(plan, tasks), host_gap_us)
    times = [(s.start_us, s.stop_us) for s in timeline.spans if _among(plan.by_name[s.task], tasks)]
    return Exposure(
        busy_us=sum(stop - start for start, stop in times),
        exposed_us=max(0.0, timeline.period_us - without.period_us),  # less than 0 is rounding
        beside_link_us=_shared_us(times, timeline.times(Lane.LINK)),
        timeline=timeline,
    )


def without_cost(plan: Plan, tasks: Tasks) -> Plan:
    """The same plan, waits and all, in which some tasks take no time."""
    return replace(plan, tasks=tuple(t._replace(cost_us=0.0) if _among(t, tasks) else t for t in plan.tasks))


def _among(task: Task, tasks: Tasks) -> bool:
    """By identity: a lane and a kind of the same name are equal."""
    return task.kind is tasks or lane_of(task) is tasks


def _shared_us(some: Times, others: Times) -> float:
    """How long both are busy; each is in order and does not overlap itself."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        (start, stop), (other_start, other_stop) = some[i], others[j]
        total += max(0.0, min(stop, other_stop) - max(start, other_start))
        if stop < other_stop:
            i += 1
        else:
            j += 1
    return total
