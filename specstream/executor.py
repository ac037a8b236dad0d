"""The CPU executor: interprets a plan, target and draft on the calling thread, copies on a thread a lane."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from torch import Tensor

from specstream.attention import Attention, LayerAttention
from specstream.batch import RoundBatch, SeatRows, TaskSpan, wanted_logits
from specstream.chunk_views import offload_copies
from specstream.graph import PartitionedModel
from specstream.kv import DeviceStore
from specstream.lanes import Event, Work, WorkerLane
from specstream.round_graph import Task, TaskKind
from specstream.round_plan import Lane, Plan, StepOp
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.target_tasks import run_target_task

Copy = Callable[[Tensor, Tensor], None]
ChooseAttention = Callable[[RoundSpec, RoundBatch], Attention]
"""Which attention a round uses, ready for it."""


class Executor(Protocol):
    """What runs rounds."""

    store: DeviceStore
    streamed_bytes: int
    link_bytes: int

    def run(self, plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None: ...

    def drain(self) -> None: ...

    def reset_counters(self) -> None: ...

    def close(self) -> None: ...


def copy_blocks(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)


def _timed(task: str, work: Work, spans: list[TaskSpan]) -> Work:
    """The same work, which notes when it was done."""

    def timed() -> None:
        start = perf_counter()
        work()
        spans.append(TaskSpan(task, start, perf_counter()))

    return timed


def _close_lanes(lanes: list[WorkerLane]) -> None:
    for lane in lanes:
        lane.close()


class CpuExecutor:
    """Runs rounds.

    The ring's rotation and the events of fetches in flight are carried from one round to the next. A round that counts
    on fewer of them than there are drops the others: its own fetches into their slots come after them on the lane.
    """

    def __init__(
        self,
        model: PartitionedModel,
        store: DeviceStore,
        choose_attention: ChooseAttention | None = None,
        copy: Copy = copy_blocks,
    ) -> None:
        """`copy(destination, source)` moves chunks between the tiers; it runs on the threads of the copy lanes."""
        self.model, self.store = model, store
        self.streamed_bytes = 0
        """Bytes of history from the host that rounds have attended to; failed rounds do not count."""
        self.link_bytes = 0
        """Bytes that fetches have moved: the streamed ones, and those fetched ahead and dropped."""
        self._copy = copy
        everywhere = LayerAttention(store)
        self._choose_attention = choose_attention or (lambda spec, batch: everywhere)
        self._attention: Attention = everywhere
        self._workers = {lane: WorkerLane(lane.value) for lane in (Lane.LINK, Lane.STORE)}
        self._finalizer = weakref.finalize(self, _close_lanes, list(self._workers.values()))
        self._in_flight: list[Event] = []
        self._rotation = 0
        self._values: dict[str, Tensor] = {}
        self._seats: dict[int, tuple[SeatSpec, SeatRows]] = {}

    def run(self, plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
        """Runs one round: `plan`, made for `spec.canonical()`, on the chunks of `spec`.

        Raises:
            Whatever a piece, a copy or what `batch` calls raised. The executor is drained then.
        """
        streamed_before = self.streamed_bytes
        try:
            self._run(plan, spec, batch)
        except BaseException:
            self.streamed_bytes = streamed_before
            self.drain()
            raise
        finally:
            self._values.clear()
            self._seats = {}  # which hold host memory
            self._attention.forget()

    def reset_counters(self) -> None:
        self.streamed_bytes = self.link_bytes = 0

    def drain(self) -> None:
        """Drops every fetch in flight and starts the ring afresh."""
        self._in_flight = []  # first: an interrupt may strike while the lanes are waited for
        self._rotation = 0
        for worker in self._workers.values():
            worker.cancel()

    def close(self) -> None:
        """Ends the threads. An executor that is merely forgotten does the same when it is collected."""
        _close_lanes(list(self._workers.values()))
        self._finalizer.detach()

    def _run(self, plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
        batch.prepare()
        self._attention = self._choose_attention(spec, batch)
        self._values = self._attention.inputs(batch)
        self._seats = {s.seat: (s, batch.seats[s.seat]) for s in spec.seats}
        before = [task.name for task in plan.tasks if task.phase == "before"]
        events = dict(zip(before, self._in_flight[: len(before)], strict=True))
        for step in plan.steps:
            worker = self._workers.get(step.lane)
            if step.op is StepOp.LAUNCH:
                task = plan.by_name[step.name]
                work = self._work(task, spec, batch)
                if batch.spans is not None and task.has_work(spec):
                    work = _timed(step.name, work, batch.spans)
                if worker is None:
                    work()
                else:
                    worker.launch(work)
            elif step.op is StepOp.RECORD:
                event = events[step.name] = Event()
                if worker is None:
                    event.set()
                else:
                    worker.record(event)
            elif step.op is StepOp.WAIT:
                if worker is None:
                    self._wait(events[step.name])
                else:
                    worker.wait(events[step.name])
            elif worker is not None:
                worker.synchronize()
        batch.settle()
        self._in_flight = [events[task.name] for task in plan.tasks if task.phase == "ahead"]
        self._rotation = (self._rotation + plan.spec.num_fetches) % self.store.staging_slots

    def _wait(self, event: Event) -> None:
        event.wait(lambda: False)
        for worker in self._workers.values():
            worker.raise_error()

    def _work(self, task: Task, spec: RoundSpec, batch: RoundBatch) -> Callable[[], None]:
        """What a launch of the task does; everything that a later round may change is looked up now."""
        match task.kind:
            case TaskKind.FETCH:
                return self._fetch(task, spec.run_of(task), batch)
            case TaskKind.OFFLOAD:
                return self._offload(task.layer, spec.run_of(task))
            case TaskKind.ACCEPT:
                return lambda: batch.accept(wanted_logits(self._values[self.model.output], batch))
            case TaskKind.DRAFT:
                return lambda: batch.draft(task.step)
            case _:
                return lambda: self._target_task(task, spec)

    def _target_task(self, task: Task, spec: RoundSpec) -> None:
        run_target_task(task, spec, self.model, self._attention, self._seats, self._values, self._slot(task))
        if task.kind is TaskKind.ATTEND:
            self.streamed_bytes += spec.run_of(task).count * self.store.layout.block_bytes

    def _fetch(self, task: Task, run: ChunkRun, batch: RoundBatch) -> Callable[[], None]:
        source = batch.kv_of(run.seat).host_view(task.layer, run.start, run.stop)
        destination = self.store.ring[self._slot(task), : run.count]

        def fetch() -> None:
            self._copy(destination, source)
            self.link_bytes += source.nbytes

        return fetch

    def _offload(self, layer: int, run: ChunkRun) -> Callable[[], None]:
        spec, rows = self._seats[run.seat]
        copies = offload_copies(self.store, layer, spec, rows.kv, run)

        def offload() -> None:
            for destination, source in copies:
                self._copy(destination, source)

        return offload

    def _slot(self, task: Task) -> int:
        return (self._rotation + task.slot) % self.store.staging_slots
