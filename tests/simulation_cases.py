"""Small random plans, and a scheduler that runs plans event by event, to compare simulations with."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from specstream.passes.assign_lanes import AssignLanes
from specstream.round_graph import Region, RoundGraph, Task, TaskKind
from specstream.round_plan import Lane, Plan, Step, StepOp
from tests.toy import make_plan, round_spec, seat

KINDS = (TaskKind.PIECE, TaskKind.FETCH, TaskKind.OFFLOAD, TaskKind.DRAFT)
BUFFERS = ("a", "b", "c", "d")


@st.composite
def random_plans(draw: st.DrawFn, in_flight: int | None = None) -> Plan:
    """Tasks on any lane, with any waits. Whatever a fetch writes is read in the round, as in real ones."""
    count = draw(st.integers(0, 3)) if in_flight is None else in_flight
    slots = [f"slot {i}" for i in range(count)]

    def task(name: str, kind: TaskKind, reads: Sequence[str], writes: Sequence[str], phase: str = "now") -> Task:
        cost = draw(st.integers(0, 9))
        return Task(name, kind, tuple(map(Region, reads)), tuple(map(Region, writes)), phase=phase, cost_us=cost)

    middle = [(TaskKind.ATTEND, ([slot], [draw(st.sampled_from(BUFFERS))])) for slot in slots]
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12)):
        reads = draw(st.lists(st.sampled_from([*BUFFERS, *slots]), max_size=2, unique=True))
        writes = draw(st.lists(st.sampled_from(BUFFERS), min_size=1, max_size=2, unique=True))
        middle.append((kind, (reads, writes)))
    program = [
        *(task(f"fetch {slot}", TaskKind.FETCH, (), [slot], "before") for slot in slots),
        *(task(f"{kind.value} {i}", kind, *uses) for i, (kind, uses) in enumerate(draw(st.permutations(middle)))),
        task("end", TaskKind.ACCEPT, BUFFERS, ["outcome"]),
        *(task(f"ahead {slot}", TaskKind.FETCH, (), [slot], "ahead") for slot in slots),
        *(
            task(f"draft {i} after", TaskKind.DRAFT, ["outcome"], ["candidates"])
            for i in range(draw(st.integers(0, 2)))
        ),
    ]
    return AssignLanes(prove=False).run(RoundGraph.from_program(round_spec(seat()), program))


@st.composite
def streaming_plans(draw: st.DrawFn) -> Plan:
    """Plans of the real passes, with a random cost for each kind of task."""
    spec = round_spec(
        *(seat(i, streamed=draw(st.integers(1, 6)), offload=draw(st.integers(0, 1))) for i in range(2)),
        layers=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 4)),
        group=draw(st.integers(1, 3)),
        warm=draw(st.booleans()),
        drafts=draw(st.integers(0, 2)),
    )
    costs = {kind: draw(st.integers(1, 20)) for kind in TaskKind}
    plan = make_plan(spec)
    return replace(plan, tasks=tuple(task._replace(cost_us=costs[task.kind]) for task in plan.tasks))


Times = list[dict[str, tuple[float, float]]]
"""For each round the start and stop of each of its tasks."""


def event_by_event(plans: Sequence[Plan], host_gap_us: float = 0.0) -> Times:
    """Lets lanes work through what the host has given them, one moment after the other."""
    queues: dict[Lane, deque[tuple[int, Step]]] = {lane: deque() for lane in Lane}
    running: dict[Lane, tuple[int, str]] = {}
    done = {(0, task.name) for task in plans[0].tasks if task.phase == "before"}
    times: Times = [{} for _ in plans]
    agenda: list[tuple[float, str]] = [(0.0, "host")]
    given = 0
    host_waits = False
    while agenda:
        now = agenda[0][0]
        while agenda and agenda[0][0] == now:
            _, who = heapq.heappop(agenda)
            if who == "host":
                for step in plans[given].steps:
                    if step.op in (StepOp.LAUNCH, StepOp.WAIT):
                        queues[step.lane].append((given, step))
                given, host_waits = given + 1, True
            else:
                done.add(_also_done(plans, running.pop(Lane(who))))
        for lane, queue in queues.items():
            while queue and lane not in running:
                number, step = queue[0]
                if step.op is StepOp.WAIT and (number, step.name) not in done:
                    break
                queue.popleft()
                if step.op is StepOp.LAUNCH:
                    stop = now + plans[number].by_name[step.name].cost_us
                    times[number][step.name] = (now, stop)
                    running[lane] = (number, step.name)
                    heapq.heappush(agenda, (stop, lane.value))
        if host_waits and given < len(plans):
            synced = [step.lane for step in plans[given - 1].steps if step.op is StepOp.SYNC]
            if not any(queues[lane] or lane in running for lane in synced):
                heapq.heappush(agenda, (now + host_gap_us, "host"))
                host_waits = False
    return times


def _also_done(plans: Sequence[Plan], task: tuple[int, str]) -> tuple[int, str]:
    """The name under which a task's end is waited for: fetches ahead are the next round's own."""
    number, name = task
    ahead = [t.name for t in plans[number].tasks if t.phase == "ahead"]
    if name not in ahead or number + 1 == len(plans):
        return task
    before = [t.name for t in plans[number + 1].tasks if t.phase == "before"]
    place = ahead.index(name)
    return (number + 1, before[place]) if place < len(before) else task
