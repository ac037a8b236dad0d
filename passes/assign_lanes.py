"""Round graph -> plan: puts tasks on lanes, copies as early as their buffers allow, with the fewest waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specstream.errors import InvalidPlan
from specstream.plan import Lane, Plan, Step, StepOp, lane_of
from specstream.round_graph import RoundGraph, Task

COPY_LANES = (Lane.STORE, Lane.LINK)
ROUND_END = (Lane.TARGET, Lane.DRAFT, Lane.STORE)
"""Lanes that are empty when a round ends; the link keeps fetching for the next round."""


@dataclass(frozen=True)
class AssignLanes:
    """Fixes the launch order and inserts records and waits.

    Order: target and draft tasks in program order; before each, every copy whose predecessors are launched.
    Waits: lanes run in order and waits are transitive, so a task waits, for each other lane, at most for its
    latest predecessor there, and not if an earlier wait implies it (vector clocks).
    """

    name: str = "assign_lanes"

    def run(self, ir: RoundGraph) -> Plan:
        order = _launch_order(ir)
        waits = _needed_waits(ir, order)
        waited_for = {event for events in waits.values() for event in events}
        steps: list[Step] = []
        for task in order:
            if task.phase == "before":
                continue
            lane = lane_of(task)
            steps += [Step(StepOp.WAIT, lane, event) for event in waits[task.name]]
            steps.append(Step(StepOp.LAUNCH, lane, task.name))
            if task.name in waited_for or task.phase == "ahead":
                steps.append(Step(StepOp.RECORD, lane, task.name))
        used = {step.lane for step in steps}
        steps += [Step(StepOp.SYNC, lane) for lane in ROUND_END if lane in used]
        return Plan(ir.spec, ir.tasks, tuple(steps))

    def check(self, ir: Plan) -> None:
        """The proof of `Plan.check`."""
        ir.check()


def _launch_order(ir: RoundGraph) -> list[Task]:
    """Tasks in launch order, those issued by the round before first.

    Raises:
        InvalidPlan: some task's predecessors can never be launched before it.
    """
    order = [task for task in ir.tasks if task.phase == "before"]
    launched = {task.name for task in order}
    copies = {lane: deque(t for t in ir.tasks if lane_of(t) is lane and t.phase != "before") for lane in COPY_LANES}

    def launch(task: Task) -> None:
        order.append(task)
        launched.add(task.name)

    def ready(task: Task) -> bool:
        return all(before in launched for before in ir.graph.predecessors(task.name))

    def launch_ready_copies() -> None:
        progress = True
        while progress:
            progress = False
            for queue in copies.values():
                while queue and ready(queue[0]):
                    launch(queue.popleft())
                    progress = True

    for task in ir.tasks:
        if lane_of(task) in COPY_LANES:
            continue
        launch_ready_copies()
        if not ready(task):
            missing = [p for p in ir.graph.predecessors(task.name) if p not in launched]
            raise InvalidPlan(f"deadlock: {task.name} needs {', '.join(missing)}, which cannot start before it")
        launch(task)
    launch_ready_copies()
    if left := [task.name for queue in copies.values() for task in queue]:
        raise InvalidPlan(f"deadlock: {', '.join(left)} can never start")
    return order


def _needed_waits(ir: RoundGraph, order: list[Task]) -> dict[str, list[str]]:
    """For each task, the events it must wait for."""
    lanes = list(Lane)
    index: dict[str, int] = {}
    clock_of: dict[str, dict[Lane, int]] = {}
    lane_clock = {lane: dict.fromkeys(lanes, -1) for lane in lanes}
    waits: dict[str, list[str]] = {}
    for position, task in enumerate(order):
        lane = lane_of(task)
        clock = lane_clock[lane]
        latest: dict[Lane, str] = {}
        for name in ir.graph.predecessors(task.name):
            other = lane_of(ir.graph.nodes[name]["task"])
            if other is not lane and (other not in latest or index[name] > index[latest[other]]):
                latest[other] = name
        needed = []
        for name in sorted(latest.values(), key=index.__getitem__, reverse=True):
            other = lane_of(ir.graph.nodes[name]["task"])
            if clock[other] < index[name]:
                needed.append(name)
                for seen, at in clock_of[name].items():
                    clock[seen] = max(clock[seen], at)
        index[task.name] = position
        clock[lane] = position
        clock_of[task.name] = dict(clock)
        waits[task.name] = needed
    return waits
