"""The proof behind `Plan.check`: one generic argument over rounds run one after the other.

Every launch gets a vector clock: for each lane, how many of its tasks are certain to be done before the launch
starts. From lanes running in order, from waits on recorded events, and from the host waiting at the end of a round,
two accesses to a region are ordered exactly if the later launch's clock covers the earlier one. Conflicting accesses
must be ordered; then every run of the plan leaves the same contents, and replaying the launches in issue order shows
whether each reader finds what it expects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specstream.errors import InvalidPlan
from specstream.plan import Lane, Plan, StepOp, lane_of
from specstream.round_graph import Content, Region, Task, TaskKind

Clock = dict[Lane, int]


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    write: bool
    lane: Lane
    index: int
    task: str


@dataclass
class _Machine:
    """What is known while rounds are issued step by step."""

    slots: int
    lane_clock: dict[Lane, Clock] = field(default_factory=lambda: {a: dict.fromkeys(Lane, 0) for a in Lane})
    host_clock: Clock = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    issued: Clock = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    accesses: dict[str, list[_Access]] = field(default_factory=lambda: defaultdict(list))
    contents: dict[tuple[str, int], str] = field(default_factory=dict)
    slot_base: int = 0

    def place(self, region: Region) -> Region:
        """Slots are numbered from the round's first fetch; here they need their absolute number."""
        if region.buffer != "slot":
            return region
        slot = (self.slot_base + region.start) % self.slots
        return Region("slot", slot, slot + 1)

    def launch(self, task: Task, where: str) -> Clock:
        lane = lane_of(task)
        clock = self.lane_clock[lane]
        for other in Lane:
            clock[other] = max(clock[other], self.host_clock[other])
        self.issued[lane] += 1
        index = self.issued[lane]
        for write, regions in ((False, task.reads), (True, task.writes)):
            for region in regions:
                self._access(self.place(region), write, lane, index, clock, where)
        clock[lane] = index
        self._replay(task, where)
        return dict(clock)

    def _access(self, region: Region, write: bool, lane: Lane, index: int, clock: Clock, where: str) -> None:
        kept = []
        for old in self.accesses[region.buffer]:
            overlaps = old.start < region.stop and region.start < old.stop
            if overlaps and (write or old.write):
                same = old.lane is lane and old.index == index
                if not same and old.lane is not lane and clock[old.lane] < old.index:
                    verbs = "writes" if write else "reads"
                    earlier = "written" if old.write else "read"
                    raise InvalidPlan(f"{where} {verbs} {region} while it may still be {earlier} by {old.task}")
                if write and not same and region.start <= old.start and old.stop <= region.stop:
                    continue  # whoever is ordered after this write is ordered after what it was ordered after
            kept.append(old)
        kept.append(_Access(region.start, region.stop, write, lane, index, where))
        self.accesses[region.buffer] = kept

    def _replay(self, task: Task, where: str) -> None:
        for content in task.expects:
            region = self.place(content.region)
            found = self.contents.get((region.buffer, region.start), "nothing")
            if found != content.value:
                raise InvalidPlan(f"{where} expects {content.value} in {region} but finds {found}")
        for content in task.leaves:
            region = self.place(content.region)
            self.contents[(region.buffer, region.start)] = content.value

    def hold(self, contents: Sequence[Content]) -> None:
        for content in contents:
            region = self.place(content.region)
            self.contents[(region.buffer, region.start)] = content.value


def check_rounds(plans: Sequence[Plan]) -> None:
    """Proves that the plans, run in this order, are free of races, stale reads, deadlocks and missing bytes.

    Raises:
        InvalidPlan: with the round, the tasks and the region or event at fault.
    """
    machine = _Machine(slots=plans[0].spec.staging_slots)
    _enter(machine, plans[0])
    carried: dict[str, Clock] = {}
    for number, plan in enumerate(plans):
        plan.validate()
        _check_bytes(plan, f"round {number}")
        events = _carry_over(machine, plan, plans[number - 1] if number else None, carried, f"round {number}")
        draft_before = machine.issued[Lane.DRAFT]
        for step in plan.steps:
            where = f"round {number}: {step.name}"
            clock = machine.lane_clock[step.lane]
            if step.op is StepOp.LAUNCH:
                task = plan.by_name[step.name]
                if lane_of(task) is not step.lane:
                    raise InvalidPlan(f"{where} is launched on the {step.lane.value} lane, not its own")
                done = machine.launch(task, where)
                if step.lane is Lane.TARGET and done[Lane.DRAFT] > draft_before:
                    raise InvalidPlan(f"{where} waits for a draft task of its own round")
            elif step.op is StepOp.RECORD:
                events[step.name] = dict(clock)
            elif step.op is StepOp.WAIT:
                if step.name not in events:
                    raise InvalidPlan(f"deadlock: {step.lane.value} waits for {where}, which is recorded only later")
                for lane, index in events[step.name].items():
                    clock[lane] = max(clock[lane], index)
            else:
                for lane, index in clock.items():
                    machine.host_clock[lane] = max(machine.host_clock[lane], index)
        carried = {name: clock for name, clock in events.items() if plan.by_name[name].phase == "ahead"}
        machine.slot_base = (machine.slot_base + plan.spec.num_fetches) % machine.slots


def _enter(machine: _Machine, plan: Plan) -> None:
    """What the rounds before have left behind: chunks on the host, chunks on the device."""
    for layer in range(plan.spec.num_layers):
        for seat in plan.spec.seats:
            for chunk in range(seat.on_host.start, seat.on_host.stop):
                machine.hold([Content(Region(f"host/{layer}/{seat.seat}", chunk, chunk + 1), f"chunk {chunk}")])
            for chunk in [
                *range(min(seat.resident, seat.open + 1)),
                *range(seat.on_host.stop, seat.open + 1),
            ]:
                slot = seat.device_slot(chunk)
                machine.hold([Content(Region(f"device/{layer}/{seat.seat}", slot, slot + 1), f"chunk {chunk}")])


def _carry_over(
    machine: _Machine, plan: Plan, before: Plan | None, carried: dict[str, Clock], where: str
) -> dict[str, Clock]:
    """Events of the fetches in flight at the start of a round, under the names this round gives them."""
    in_flight = [task for task in plan.tasks if task.phase == "before"]
    if before is None:
        return {task.name: machine.launch(task, f"{where}: {task.name}") for task in in_flight}
    if not in_flight:
        return {}
    ahead = [task for task in before.tasks if task.phase == "ahead"]
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
    attended = sorted(
        (t.layer, t.run.seat, chunk)
        for t in plan.tasks
        if t.kind is TaskKind.ATTEND and t.run
        for chunk in range(t.run.start, t.run.stop)
    )
    expected = sorted(
        (layer, seat.seat, chunk)
        for layer in range(spec.num_layers)
        for seat in spec.seats
        for chunk in range(seat.on_host.start, seat.on_host.stop)
    )
    if attended != expected:
        raise InvalidPlan(f"{where} does not attend to every streamed chunk exactly once in each layer")
