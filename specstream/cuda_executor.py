"""The CUDA executor: interprets a plan, each lane as a stream; rounds that recur are captured once and replayed.

A captured round is one graph of the target and link lanes: pieces, attention and the fetches with their waits. Its
copies are re-pointed when chunks are committed. The store lane, acceptance and drafts are launched beside it.

While the device computes, and the link fetches, the host captures what recurs and plans ahead: between two rounds it
has no more time than the fetches in flight last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specstream.attention import Attention, Rows
from specstream.attention_choice import KernelChoice
from specstream.batch import RoundBatch, wanted_logits
from specstream.chunk_views import offload_copies
from specstream.device_copy import Transfer, latest_node
from specstream.graph import PartitionedModel
from specstream.kv import DeviceStore, SequenceKV
from specstream.lane_streams import LaneStreams
from specstream.load_kernels import ROWS_OF_A_PROMPT, load_kernels, seat_counts
from specstream.prompt_attention import PromptAttention
from specstream.round_graph import Task, TaskKind
from specstream.round_plan import Lane, Plan, StepOp
from specstream.round_spec import ChunkRun, RoundSpec
from specstream.streams import CurrentStream, abandon_capture, new_event, new_gate, on_stream, record
from specstream.table_sizes import TableSizes
from specstream.target_tasks import run_target_task
from specstream.task_times import BEGIN, DRAFTING, TaskTimes

KEPT_GRAPHS = 64
Key = tuple[RoundSpec, tuple[int, ...], int, TableSizes, int]
"""Rounds of one canonical form, seating, ring rotation and sizes replay one graph, or another while their tasks are
timed."""
Sources = dict[tuple[bool, int], object]
"""For each group of this round and, with True, of the next one: which chunks of which host memory it is."""


@dataclass
class CapturedRound:
    """A graph of the target and link lanes of a round."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """[1, rows, vocab], written by every replay."""
    logits_ready: torch.cuda.Event | None
    """None if that is at its end: without fetches it is nodes in one line, which are the quickest to launch."""
    fetches: dict[str, Any]
    """The copies' nodes by task name."""
    sources: Sources
    """What the copies were last pointed at."""


class CudaExecutor:
    """Runs rounds on a CUDA device; see `CpuExecutor` for what it carries from one round to the next."""

    def __init__(self, model: PartitionedModel, store: DeviceStore, most_blocks: int, streams: LaneStreams) -> None:
        """`most_blocks`: device blocks that one request may have."""
        self.model, self.store = model, store
        self.streamed_bytes = self.link_bytes = 0
        self.launch_seconds = 0.0
        """Host time of the last round until everything but acceptance and drafts was launched."""
        self.draft_seconds: float | None = None
        """Time on the device of the draft steps of the last round; None if it had none."""
        device = store.device
        self._streams, self._capturing = streams.lanes, streams.capturing
        for_prompts = PromptAttention(store, num_heads=model.spec.attentions[0].num_heads)
        self._choice = KernelChoice(store, model.spec, most_blocks, for_prompts)
        self._attention: Attention = self._choice.for_prompts
        self._graphs: OrderedDict[Key, CapturedRound] = OrderedDict()
        self._seen: set[Key] = set()
        """Rounds that have been interpreted: when they recur, they are worth a graph."""
        self._times, self._rotation = TaskTimes(device), 0
        self._in_flight: list[torch.cuda.Event] = []
        self._values: dict[str, Tensor] = {}
        self._rows: Rows = {}
        self._kv: dict[int, SequenceKV] = {}
        """By seat, of whatever a round fetches."""
        self._current, self._called = CurrentStream(device), new_event()
        for stream in self._streams.values():  # weights may still be on their way
            stream.wait_stream(self._current.stream)

    def load_kernels(self, most_seats: int, rows_of_seat: int) -> None:
        """Those of rounds in which one to so many requests verify so many rows each, and those of prompts."""
        sizes = {(seats, rows_of_seat) for seats in seat_counts(most_seats)} | {(1, n) for n in ROWS_OF_A_PROMPT}
        with on_stream(self._streams[Lane.TARGET]):
            load_kernels(self.model, self._choice, sorted(sizes))

    def run(self, plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
        """Runs one round: `plan`, made for `spec.canonical()`, on the chunks of `spec`.

        Raises:
            Whatever a piece, a copy or what `batch` calls raised. The executor is drained then.
        """
        start = time.perf_counter()
        try:
            with torch.cuda.device(self.store.device):
                logits, ready, interpreted = self._launch(plan, spec, batch)
                self.launch_seconds = time.perf_counter() - start
                ahead = partial(self._work_ahead, plan, spec, batch, interpreted)
                if logits is None or self._may_go_on(batch):
                    self.draft_seconds = None
                    ahead(self._streams[Lane.TARGET])
                else:
                    self._accept_and_draft(plan, batch, logits, ready, ahead)
        except BaseException:
            self.drain()
            raise
        finally:
            self._values, self._rows, self._kv = {}, {}, {}  # which hold host memory
            self._attention.forget()
        self.streamed_bytes += spec.streamed_bytes
        self.link_bytes += spec.fetched_bytes
        self._rotation = (self._rotation + spec.num_fetches) % self.store.staging_slots

    def reset_counters(self) -> None:
        self.streamed_bytes = self.link_bytes = 0

    def drain(self) -> None:
        """Waits for everything launched, drops every fetch in flight and starts the ring afresh."""
        self._in_flight = []  # first: an interrupt may strike while the streams are waited for
        self._rotation = 0
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        self.drain()
        self._graphs.clear()

    # Launching

    def _launch(
        self, plan: Plan, spec: RoundSpec, batch: RoundBatch
    ) -> tuple[Tensor | None, torch.cuda.Event, Key | None]:
        """Puts the round on its lanes.

        Returns:
            Its logits, when they are there, and, if it was interpreted but a graph could replay it, the graph's key.
        """
        self._rows = {s.seat: (s, batch.seats[s.seat]) for s in spec.seats}
        self._kv = {run.seat: batch.kv_of(run.seat) for run in (*spec.groups, *spec.next_groups)}
        target = self._streams[Lane.TARGET]
        self._called.record(self._current.stream)
        target.wait_event(self._called)  # blocks that were given back are overwritten there
        key = None
        with target:
            self._times.begin(plan, batch.spans)
            kernels = self._choice.kernels(spec, batch)
            self._attention = kernels or self._choice.for_prompts
            if kernels is not None:
                key = plan.spec, spec.seating, self._rotation, kernels.tables.sizes, self._times.turn
                if key in self._graphs:
                    return *self._replay(key, plan, spec), None
        return *self._interpret(plan, spec, batch), key

    def _replay(self, key: Key, plan: Plan, spec: RoundSpec) -> tuple[Tensor, torch.cuda.Event]:
        """Launches a round's graph on the target's stream, which is the current one, and its store lane beside it."""
        captured, target = self._graphs[key], self._streams[Lane.TARGET]
        self._graphs.move_to_end(key)
        stored = self._store(plan, spec)
        if stored is not None and _waits_for_store(plan):
            target.wait_event(stored)
        for event in set(self._in_flight):  # also of fetches that are dropped: the graph's own fetches come after them
            target.wait_event(event)
        if captured.fetches:
            self._repoint(captured, plan, spec)
        captured.graph.replay()
        done = record(target)
        self._in_flight = [done] * len(spec.exit)
        if captured.fetches:
            self._streams[Lane.LINK].wait_event(done)
        if stored is not None:
            target.wait_event(stored)  # of the next round: it may write where the copy has read
        return captured.logits, captured.logits_ready or done

    def _interpret(self, plan: Plan, spec: RoundSpec, batch: RoundBatch) -> tuple[Tensor | None, torch.cuda.Event]:
        """Launches every step of the plan on its lane's stream."""
        with self._streams[Lane.TARGET]:
            self._times.end(BEGIN)
            self._values = self._attention.inputs(batch)
        # The target has waited for what the round before wrote to the host: it may be fetched at once.
        self._streams[Lane.LINK].wait_stream(self._streams[Lane.TARGET])
        before = [task.name for task in plan.tasks if task.phase == "before"]
        events = dict(zip(before, self._in_flight[: len(before)], strict=True))
        for step in plan.steps:
            task = plan.by_name.get(step.name)
            if step.lane is Lane.DRAFT or (task is not None and task.kind is TaskKind.ACCEPT):
                continue
            stream = self._streams[step.lane]
            if step.op is StepOp.LAUNCH and task is not None and task.has_work(spec):
                with stream:
                    self._work(task, spec, stream)
                    self._times.end(task.name)
            elif step.op is StepOp.RECORD:
                events[step.name] = record(stream)
            elif step.op is StepOp.WAIT and step.name in events:
                stream.wait_event(events[step.name])
        ready = record(self._streams[Lane.TARGET])
        self._in_flight = [events[task.name] for task in plan.tasks if task.phase == "ahead"]
        self._streams[Lane.TARGET].wait_stream(self._streams[Lane.STORE])
        self._streams[Lane.STORE].wait_stream(self._streams[Lane.TARGET])
        return self._values.get(self.model.output), ready

    def _capture(self, plan: Plan, spec: RoundSpec, batch: RoundBatch) -> CapturedRound:
        """Interprets the target and link lanes of a plan, whose round has just been launched, into a graph.

        Nothing runs, and nobody waits: the device goes on with what it was given.
        """
        target, link = self._capturing[Lane.TARGET], self._capturing[Lane.LINK]
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        fetches: dict[str, Any] = {}
        ready = new_gate() if plan.by_kind[TaskKind.FETCH] else None
        # All graphs share their memory: rounds run one after the other, and only their logits outlast them.
        pool = next((kept.graph.pool() for kept in self._graphs.values()), None)
        with torch.cuda.stream(target):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                link.wait_stream(target)
                self._times.end(BEGIN)
                self._values = self._attention.inputs(batch)  # of buffers that stay where they are
                self._capture_steps(plan, spec, fetches, ready)
                target.wait_stream(link)
            except BaseException:
                with suppress(RuntimeError):  # the link may not have joined yet
                    target.wait_stream(link)
                abandon_capture(graph)
                raise
            graph.capture_end()
        graph.instantiate()
        return CapturedRound(graph, self._values[self.model.output], ready, fetches, self._sources(spec))

    def _capture_steps(
        self, plan: Plan, spec: RoundSpec, fetches: dict[str, Any], ready: torch.cuda.Event | None
    ) -> None:
        events: dict[str, torch.cuda.Event] = {}
        for step in plan.steps:
            task = plan.by_name.get(step.name)
            if step.lane not in self._capturing or task is None or task.kind is TaskKind.ACCEPT:
                continue
            stream = self._capturing[step.lane]
            if step.op is StepOp.LAUNCH:
                with torch.cuda.stream(stream):
                    self._work(task, spec, stream)
                    if task.kind is TaskKind.FETCH:
                        fetches[task.name] = latest_node(stream)
                    self._times.end(task.name)
                if ready is not None and task.kind is TaskKind.PIECE and task.layer == len(self.model.sites):
                    ready.record(stream)
            elif step.op is StepOp.RECORD:
                events[step.name] = record(stream)
            elif step.name in events:  # else it was in flight when the round began
                stream.wait_event(events[step.name])

    def _keep(self, key: Key, captured: CapturedRound) -> None:
        self._graphs[key] = captured
        if len(self._graphs) > KEPT_GRAPHS:
            self._graphs.popitem(last=False)

    def _sources(self, spec: RoundSpec) -> Sources:
        def source(run: ChunkRun) -> object:
            host = self._kv[run.seat].host
            assert host is not None
            return run, id(host.extent), host.start

        groups = {(False, index): source(run) for index, run in enumerate(spec.groups)}
        return groups | {(True, index): source(run) for index, run in enumerate(spec.next_groups)}

    def _repoint(self, captured: CapturedRound, plan: Plan, spec: RoundSpec) -> None:
        """Points the graph's copies at the round's own chunks, where they are not yet."""
        sources = self._sources(spec)
        changed = {group for group, source in sources.items() if captured.sources[group] != source}
        if not changed:
            return
        exec_graph = captured.graph.raw_cuda_graph_exec()
        for name, node in captured.fetches.items():
            task = plan.by_name[name]
            if (task.phase == "ahead", task.group) in changed:
                self._transfer(task, spec).repoint(exec_graph, node)
        captured.sources = sources

    def _store(self, plan: Plan, spec: RoundSpec) -> torch.cuda.Event | None:
        """Launches the store lane of a round whose rows it does not touch; returns its end."""
        stream = self._streams[Lane.STORE]
        if not any(seat.offload for seat in spec.seats):
            return None
        tasks = [task for task in plan.by_kind[TaskKind.OFFLOAD] if task.has_work(spec)]
        stream.wait_stream(self._streams[Lane.TARGET])
        with stream:
            for task in tasks:
                self._offload(task, spec, stream)
                self._times.end(task.name)
        return record(stream)

    # Tasks

    def _work(self, task: Task, spec: RoundSpec, stream: torch.cuda.Stream) -> None:
        """Launches a task on the current stream, which is `stream`."""
        if task.kind is TaskKind.FETCH:
            self._transfer(task, spec).launch(stream.cuda_stream)
        elif task.kind is TaskKind.OFFLOAD:
            self._offload(task, spec, stream)
        else:
            attention, slot = self._attention, self._slot(task)
            run_target_task(task, spec, self.model, attention, self._rows, self._values, slot)

    def _transfer(self, task: Task, spec: RoundSpec) -> Transfer:
        """The copy of a fetch."""
        run = spec.run_of(task)
        source = self._kv[run.seat].host_view(task.layer, run.start, run.stop)
        return Transfer(self.store.ring[self._slot(task)].data_ptr(), source.data_ptr(), source.nbytes, True)

    def _offload(self, task: Task, spec: RoundSpec, stream: torch.cuda.Stream) -> None:
        run = spec.run_of(task)
        seat, rows = self._rows[run.seat]
        for destination, source in offload_copies(self.store, task.layer, seat, rows.kv, run):
            Transfer(destination.data_ptr(), source.data_ptr(), source.nbytes, False).launch(stream.cuda_stream)

    def _slot(self, task: Task) -> int:
        return (self._rotation + task.slot) % self.store.staging_slots

    # After the target

    def _may_go_on(self, batch: RoundBatch) -> bool:
        """Whether the host need not wait for the round: a part of prompts whose logits nobody needs.

        The kernels' tables are written by the host, so a round that reads them has to end before the next one's are.
        """
        return not batch.rows.wanted and self._attention is self._choice.for_prompts

    def _accept_and_draft(
        self,
        plan: Plan,
        batch: RoundBatch,
        logits: Tensor,
        ready: torch.cuda.Event,
        ahead: Callable[[torch.cuda.Stream], None],
    ) -> None:
        """Acceptance and draft steps, in the plan's order, on the draft's stream: the link goes on meanwhile.

        The host works ahead before it first waits: for the logits, if it accepts itself, or for all that follows them.
        """
        stream, beside = self._streams[Lane.DRAFT], plan.spec.drafts_beside
        steps = plan.by_kind[TaskKind.DRAFT]

        def draft() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            start = record(stream, timed=True)
            self._times.end(DRAFTING)
            for task in steps:
                batch.draft(task.step)
                self._times.end(task.name)
            return start, record(stream, timed=True)

        with stream:
            only_launches = batch.prepare()
            drafted = draft() if beside else None
            if not only_launches:
                ahead(self._streams[Lane.TARGET])
            stream.wait_event(ready)
            batch.accept(wanted_logits(logits, batch))
            self._times.end("accept")
            start, end = drafted or draft()
            if only_launches:
                ahead(stream)
            batch.settle()
            if not only_launches:  # else it has waited for all
                stream.synchronize()
            self._times.read()
        self.draft_seconds = start.elapsed_time(end) / 1e3 if steps else None

    def _work_ahead(
        self, plan: Plan, spec: RoundSpec, batch: RoundBatch, interpreted: Key | None, busy: torch.cuda.Stream
    ) -> None:
        """Captures the round if it was interpreted, and not for the first time; then plans while the stream is busy."""
        if interpreted is not None and interpreted in self._seen:
            self._keep(interpreted, self._capture(plan, spec, batch))
        elif interpreted is not None:
            self._seen.add(interpreted)
        while not busy.query() and batch.work_ahead():
            pass


def _waits_for_store(plan: Plan) -> bool:
    """Whether target or link need what the store lane does in the same round."""
    waits = (step.name for step in plan.steps if step.op is StepOp.WAIT and step.lane is not Lane.STORE)
    return any(plan.by_name[name].kind is TaskKind.OFFLOAD for name in waits)
