"""Round graph -> plan: puts tasks on lanes, copies as early as their buffers allow, with the fewest waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specstream.errors import InvalidPlan
from specstream.pieces import Pieces
from specstream.pipeline import LongPass
from specstream.round_graph import RoundGraph, Task
from specstream.round_plan import Lane, Plan, Step, StepOp, lane_of

COPY_LANES = (Lane.STORE, Lane.LINK)
ROUND_END = (Lane.TARGET, Lane.DRAFT, Lane.STORE)
"""Lanes that are empty when a round ends; the link keeps fetching for the next round."""


@dataclass(frozen=True)
class AssignLanes(LongPass[Plan]):
    """Fixes the launch order and inserts records and waits.

    Order: target and draft tasks in program order; before each, every copy whose predecessors are launched.
    Waits: lanes run in order and waits are transitive, so a task waits, for each other lane, at most for its
    latest predecessor there, and not if an earlier wait implies it (vector clocks).
    """

    prove: bool = True
    """False leaves the proof, which takes longer than all passes, to whoever makes the plan."""
    name: str = "assign_lanes"

    def pieces(self, ir: RoundGraph) -> Pieces[Plan]:
        order = yield from _launch_order(ir)
        waits = yield from _needed_waits(ir, order)
        waited_for = {event for events in waits.values() for event in events}
        steps: list[Step] = []
        for task in order:
            yield
            if task.phase == "before":
                continue
            name, lane = task.name, lane_of(task)
            for event in waits.get(name, ()):
                steps.append(Step(StepOp.WAIT, lane, event))
            steps.append(Step(StepOp.LAUNCH, lane, name))
            if name in waited_for or task.phase == "ahead":
                steps.append(Step(StepOp.RECORD, lane, name))
        used = {step.lane for step in steps}
        steps += [Step(StepOp.SYNC, lane) for lane in ROUND_END if lane in used]
        return Plan(ir.spec, ir.tasks, tuple(steps))

    def check(self, ir: Plan) -> None:
        """The proof of `Plan.check`."""
        if self.prove:
            ir.check()


def _launch_order(ir: RoundGraph) -> Pieces[list[Task]]:
    """Tasks in launch order, those issued by the round before first.

    Raises:
        InvalidPlan: some task's predecessors can never be launched before it.
    """
    order = [task for task in ir.tasks if task.phase == "before"]
    launched = {task.name for task in order}
    copies: dict[Lane, deque[Task]] = {lane: deque() for lane in COPY_LANES}
    others: list[Task] = []
    for task in ir.tasks:
        if task.phase != "before":
            copies.get(lane_of(task), others).append(task)

    def launch(task: Task) -> None:
        order.append(task)
        launched.add(task.name)

    def ready(task: Task) -> bool:
        return launched.issuperset(ir.before[task.name])

    def launch_ready_copies() -> None:
        progress = True
        while progress:
            progress = False
            for queue in copies.values():
                while queue and ready(queue[0]):
                    launch(queue.popleft())
                    progress = True

    for task in others:
        yield
        launch_ready_copies()
        if not ready(task):
            missing = [name for name in ir.before[task.name] if name not in launched]
            raise InvalidPlan(f"deadlock: {task.name} needs {', '.join(missing)}, which cannot start before it")
        launch(task)
    launch_ready_copies()
    if left := [task.name for queue in copies.values() for task in queue]:
        raise InvalidPlan(f"deadlock: {', '.join(left)} can never start")
    return order


def _needed_waits(ir: RoundGraph, order: list[Task]) -> Pieces[dict[str, list[str]]]:
    """For each task that must wait, the events.

    A clock has, for each lane in the order of `Lane`, the place in `order` of the latest task there that is certain
    to be done. That an offload is done proves nothing of other tasks: a round of the same canonical form may have
    nothing to write out, and its plan must be right without it.
    """
    number = {lane: index for index, lane in enumerate(Lane)}
    lane_clock = [[-1] * len(number) for _ in number]
    lane_at: dict[str, tuple[int, int]] = {}
    """Of tasks by name: lane, and place in the order."""
    clock_of: dict[str, list[int]] = {}
    offloads_done: list[set[str]] = [set() for _ in number]
    waits: dict[str, list[str]] = {}
    for position, task in enumerate(order):
        yield
        lane = number[lane_of(task)]
        clock = lane_clock[lane]
        latest: dict[int, tuple[int, str]] = {}
        for name in ir.before[task.name]:
            other, at = lane_at[name]
            if other == number[Lane.STORE] != lane:
                if name not in offloads_done[lane]:
                    waits.setdefault(task.name, []).append(name)
                    offloads_done[lane].add(name)
            elif at > clock[other] and (other not in latest or at > latest[other][0]):
                latest[other] = at, name
        for at, name in sorted(latest.values(), reverse=True):
            if clock[lane_at[name][0]] < at:  # else one of the events before implies it
                waits.setdefault(task.name, []).append(name)
                clock[:] = map(max, clock, clock_of[name])
        clock[lane] = position
        lane_at[task.name], clock_of[task.name] = (lane, position), clock.copy()
    return waits
