"""The proof behind `Plan.check`: one generic argument over rounds run one after the other.

Every launch gets a vector clock: for each lane, how many of its tasks are certain to be done before the launch
starts. From lanes running in order, from waits on recorded events, and from the host waiting at the end of a round,
two accesses to a region are ordered exactly if the later launch's clock covers the earlier one. Conflicting accesses
must be ordered; then every run of the plan leaves the same contents, and replaying the launches in issue order shows
whether each reader finds what it expects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specstream.errors import InvalidPlan
from specstream.pieces import Pieces
from specstream.round_graph import IN_PLACE, Content, Region, Task, TaskKind
from specstream.round_plan import Lane, Plan, StepOp, lane_of

NUMBER = {lane: number for number, lane in enumerate(Lane)}
Clock = list[int]
"""A count of tasks for each lane, by its number."""


def _zeros() -> Clock:
    return [0] * len(NUMBER)


class _Access(NamedTuple):
    start: int
    stop: int
    write: bool
    lane: int
    number: int
    """Which of its lane's tasks made it."""
    where: str


class _Held(NamedTuple):
    start: int
    stop: int
    value: str


@dataclass
class _Machine:
    """What is known while rounds are issued step by step."""

    slots: int
    lane_clock: list[Clock] = field(default_factory=lambda: [_zeros() for _ in Lane])
    host_clock: Clock = field(default_factory=_zeros)
    issued: Clock = field(default_factory=_zeros)
    accesses: dict[str, list[_Access]] = field(default_factory=lambda: defaultdict(list))
    contents: dict[str, list[_Held]] = field(default_factory=lambda: defaultdict(list))
    """Of each buffer: what it holds, in intervals that do not overlap."""
    slot_base: int = 0

    def place(self, region: Region) -> Region:
        """Slots are numbered from the round's first fetch; here each is a buffer, by its absolute number."""
        if region.buffer != "slot":
            return region
        return Region(f"slot {(self.slot_base + region.start) % self.slots}")

    def launch(self, task: Task, where: str) -> Clock:
        if not task.reads and not task.writes:
            raise InvalidPlan(f"{where} does not say what it reads and writes, so nothing can be proven of it")
        lane = NUMBER[lane_of(task)]
        clock = self.lane_clock[lane]
        clock[:] = map(max, clock, self.host_clock)
        self.issued[lane] += 1
        for region in task.reads:
            self._access(self.place(region), False, lane, clock, where)
        for region in task.writes:
            self._access(self.place(region), True, lane, clock, where)
        clock[lane] = self.issued[lane]
        for content in task.expects:
            self._expect(content, where)
        self.hold(task.leaves)
        return clock.copy()

    def _access(self, region: Region, write: bool, lane: int, clock: Clock, where: str) -> None:
        buffer, start, stop = region
        kept = []
        for old in self.accesses[buffer]:
            old_start, old_stop, old_write, old_lane, old_number, old_where = old
            if old_start < stop and start < old_stop:
                if (write or old_write) and old_lane != lane and clock[old_lane] < old_number:
                    verbs = "writes" if write else "reads"
                    earlier = "written" if old_write else "read"
                    raise InvalidPlan(f"{where} {verbs} {region} while it may still be {earlier} by {old_where}")
                if start <= old_start and old_stop <= stop and (write or (old_lane == lane and not old_write)):
                    continue  # whoever is ordered after this access is ordered after that one too
            kept.append(old)
        kept.append(_Access(start, stop, write, lane, self.issued[lane], where))
        self.accesses[buffer] = kept

    def _expect(self, content: Content, where: str) -> None:
        buffer, start, stop = region = self.place(content.region)
        found = [held for held in self.contents[buffer] if held.start < stop and start < held.stop]
        right = sum(min(h.stop, stop) - max(h.start, start) for h in found if h.value == content.value)
        if right != stop - start:
            others = sorted({held.value for held in found} - {content.value})
            raise InvalidPlan(f"{where} expects {content.value} in {region} but finds {', '.join(others) or 'nothing'}")

    def hold(self, contents: Iterable[Content]) -> None:
        """Puts contents in their places, over what was there."""
        for content in contents:
            buffer, start, stop = self.place(content.region)
            kept = [_Held(start, stop, content.value)]
            for held in self.contents[buffer]:
                if held.stop <= start or stop <= held.start:
                    kept.append(held)
                    continue
                if held.start < start:
                    kept.append(_Held(held.start, start, held.value))
                if stop < held.stop:
                    kept.append(_Held(stop, held.stop, held.value))
            self.contents[buffer] = kept


def prove_rounds(plans: Sequence[Plan]) -> Pieces[None]:
    """Proves that the plans, run in this order, are free of races, stale reads, deadlocks and missing bytes.

    Raises:
        InvalidPlan: with the round, the tasks and the region or event at fault.
    """
    machine = _Machine(slots=plans[0].spec.staging_slots)
    target, draft = NUMBER[Lane.TARGET], NUMBER[Lane.DRAFT]
    carried: dict[str, Clock] = {}
    for number, plan in enumerate(plans):
        before = plans[number - 1] if number else None
        if plan is not before:
            plan.validate()
            _check_bytes(plan, f"round {number}")
        yield from _enter(machine, plan, before)
        events = _carry_over(machine, plan, before, carried, f"round {number}")
        dropped = _dropped(plan, plans[number + 1]) if number + 1 < len(plans) else set()
        draft_before = machine.issued[draft]
        for op, step_lane, name in plan.steps:
            yield
            where, lane = f"round {number}: {name}", NUMBER[step_lane]
            clock = machine.lane_clock[lane]
            if op is StepOp.LAUNCH:
                task = plan.by_name[name]
                if lane_of(task) is not step_lane:
                    raise InvalidPlan(f"{where} is launched on the {step_lane.value} lane, not its own")
                if name in dropped:
                    task = task._replace(reads=(), expects=(), leaves=(Content(task.writes[0], "what is dropped"),))
                done = machine.launch(task, where)
                if lane == target and done[draft] > draft_before:
                    raise InvalidPlan(f"{where} waits for a draft task of its own round")
            elif op is StepOp.RECORD:
                events[name] = clock.copy()
            elif op is StepOp.WAIT:
                if name not in events:
                    raise InvalidPlan(f"deadlock: {step_lane.value} waits for {where}, which is recorded only later")
                clock[:] = map(max, clock, events[name])
            else:
                machine.host_clock[:] = map(max, machine.host_clock, clock)
        carried = {name: clock for name, clock in events.items() if plan.by_name[name].phase == "ahead"}
        machine.slot_base = (machine.slot_base + plan.spec.num_fetches) % machine.slots


def _enter(machine: _Machine, plan: Plan, before: Plan | None) -> Pieces[None]:
    """What earlier rounds than `before` have left behind: chunks on the host, chunks on the device."""
    seats_before = {seat.seat for seat in before.spec.seats} if before else set()
    for layer in range(plan.spec.num_layers):
        for seat in plan.spec.seats:
            yield
            if seat.seat in seats_before:
                continue
            run, device = seat.on_host, f"device/{layer}/{seat.seat}"
            machine.hold([Content(Region(f"host/{layer}/{seat.seat}", run.start, run.stop), IN_PLACE)])
            machine.hold([Content(Region(device, 0, min(seat.resident, seat.open + 1)), IN_PLACE)])
            for chunk in range(run.stop, seat.open + 1):
                slot = seat.device_slot(chunk)
                machine.hold([Content(Region(device, slot, slot + 1), f"chunk {chunk}")])
        for run in plan.spec.next_runs or ():
            if run.seat not in seats_before | {seat.seat for seat in plan.spec.seats}:
                machine.hold([Content(Region(f"host/{layer}/{run.seat}", run.start, run.stop), IN_PLACE)])


def _ahead(plan: Plan) -> list[Task]:
    return [task for task in plan.tasks if task.phase == "ahead"]


def _dropped(plan: Plan, following: Plan) -> set[str]:
    """Fetches for the next round that it does not count on: what they read may change while they read it."""
    return {task.name for task in _ahead(plan)[following.spec.in_flight :]}


def _carry_over(
    machine: _Machine, plan: Plan, before: Plan | None, carried: dict[str, Clock], where: str
) -> dict[str, Clock]:
    """Events of the fetches in flight at the start of a round, under the names this round gives them."""
    in_flight = [task for task in plan.tasks if task.phase == "before"]
    if before is None:
        return {task.name: machine.launch(task, f"{where}: {task.name}") for task in in_flight}
    ahead = _ahead(before)[: len(in_flight)]
    if [(t.layer, t.run) for t in ahead] != [(t.layer, t.run) for t in in_flight]:
        raise InvalidPlan(f"{where} counts on fetches that the round before did not issue")
    if missing := [t.name for t in ahead if t.name not in carried]:
        raise InvalidPlan(f"{where} counts on {missing[0]}, whose end the round before did not record")
    return {now.name: carried[then.name] for now, then in zip(in_flight, ahead, strict=True)}


def _check_bytes(plan: Plan, where: str) -> None:
    """Every layer attends to every streamed chunk, and the fetched bytes are the streamed bytes."""
    spec = plan.spec
    fetched = sum(t.link_bytes for t in plan.tasks if t.kind is TaskKind.FETCH and t.phase != "ahead")
    if fetched != spec.streamed_bytes:
        raise InvalidPlan(f"{where} fetches {fetched} bytes; the streamed history has {spec.streamed_bytes}")
    reached = {(layer, seat.seat): seat.on_host.start for layer in range(spec.num_layers) for seat in spec.seats}
    runs = [(t.layer, t.run.seat, t.run.start, t.run.stop) for t in plan.tasks if t.kind is TaskKind.ATTEND and t.run]
    in_a_row = True
    for layer, number, start, stop in sorted(runs):
        in_a_row = in_a_row and reached.get((layer, number)) == start
        reached[layer, number] = stop
    ends = {(layer, seat.seat): seat.on_host.stop for layer in range(spec.num_layers) for seat in spec.seats}
    if not in_a_row or reached != ends:
        raise InvalidPlan(f"{where} does not attend to every streamed chunk exactly once in each layer")
