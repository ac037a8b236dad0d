"""A round in steady state: what it is like when rounds of the same plan have followed one another for long.

Starts and ends are maxima of sums, so that what a round leaves is, seen from what it found, a linear map in max-plus
algebra. Simulating until nothing changes could take hundreds of rounds if link and target are nearly as fast as each
other. Howard's policy iteration takes a few: in each simulated round, go back from every task that the next round may
wait for to the one in the round before that its chain of causes begins with. Following these leads round and round in
cycles; the slowest gives the period, and all else, put where it is relative to that, is what the next simulated round
starts from. If that round leaves what it found, a
period later, it is the steady one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from specstream.round_plan import Plan
from specstream.simulate import run_round
from specstream.timeline import Left, Timeline

MOST_ROUNDS = 50
"""Far more than are needed: of 3,000 random plans none took more than five."""
TOLERANCE_US = 1e-6


def steady_round(plan: Plan, host_gap_us: float = 0.0) -> Timeline:
    """The round that repeats itself if the plan follows itself for ever; its `period_us` is what a round takes.

    A plan that does not leave as many fetches in flight as it counts on cannot do so: then it is one round, on idle
    lanes. If alternating rounds would be as fast on average, their average is meant. A link that falls behind further
    in every round, because nobody waits for it, has no steady state: the latest round simulated is given.
    """
    before = run_round(plan, None, host_gap_us)
    in_flight = sum(task.phase == "before" for task in plan.tasks)
    if in_flight != len(before.left.ahead) or not before.left.awaited:
        return before
    found = before.left
    for _ in range(MOST_ROUNDS):
        timeline = run_round(plan, found, host_gap_us)
        later = [us - found.ends[name] for name, us in timeline.left.ends.items()]
        if max(later) - min(later) < TOLERANCE_US:
            return replace(timeline, repeats=True)
        found = _improved(timeline, found, host_gap_us)
    return timeline


class _Origin(NamedTuple):
    """Where the chain of causes of a task begins."""

    task: str
    """Of the round before."""
    us: float
    """From its end to the end of the chain."""


def _improved(timeline: Timeline, found: Left, host_gap_us: float) -> Left:
    """What a round would find if its slowest cycle had come round for long."""
    start, stops = found.next_start_us(host_gap_us), timeline.left.ends
    origins: dict[str, _Origin] = {}
    for name, stop in stops.items():
        span = timeline.by_task[name]
        while not span.earlier:
            span = timeline.by_task[span.cause]
        origins[name] = _Origin(span.cause, start + stop - found.ends[span.cause])
    cycles = {name: _cycle(origins, name) for name in origins}
    periods = {name: sum(origins[task].us for task in cycle) / len(cycle) for name, cycle in cycles.items()}
    slowest = max(periods, key=periods.__getitem__)
    period, base = periods[slowest], cycles[slowest][0]
    ends = {base: found.ends[base] - start + period}

    def settle(name: str) -> float:
        if name not in ends:
            ends[name] = settle(origins[name].task) + origins[name].us - period
        return ends[name]

    for name, stop in stops.items():
        if base in cycles[name]:
            settle(name)
        elif periods[name] > period - TOLERANCE_US:
            ends[name] = stop
        else:  # in the long run it is so early that it does not matter, unless the slowest cycle makes it later
            ends[name] = stop - sum(s.stop_us - s.start_us for s in timeline.spans) - host_gap_us
    return replace(timeline.left, ends=ends)


def _cycle(origins: dict[str, _Origin], name: str) -> list[str]:
    """The tasks that going back from one leads round and round."""
    path = [name]
    while (origin := origins[path[-1]].task) not in path:
        path.append(origin)
    return path[path.index(origin) :]
