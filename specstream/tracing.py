"""Recording an engine: what it is told of each round goes to a run's files while `engine.trace` lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from specstream.batch import TaskSpan
from specstream.bench_machine import machine, versions
from specstream.caller import warn_caller
from specstream.errors import InvalidOption
from specstream.exclusive import exclusive
from specstream.memory import MemoryPlan
from specstream.options import SELF
from specstream.planner import Planner
from specstream.round_spec import RoundSpec
from specstream.scheduler import RequestRows
from specstream.traces.planned import planned_round
from specstream.traces.records import MeasuredSpan, PlannedRound, RecordedRound, RequestRound, RunInfo
from specstream.traces.run_writer import RunWriter

if TYPE_CHECKING:
    from specstream.engine import Engine


@contextmanager
def trace(engine: Engine, logdir: str | Path, run: str | None, rounds: int) -> Iterator[Path]:
    """Records the rounds that an engine runs while it lasts, and the plans that they followed.

    Recording costs a round some microseconds a task, and one whose structure is new the time to predict it: while a
    device computes the next round, or between the two. If the disk is full, say, a warning tells so, and the engine
    goes on without. Where TensorBoard is not installed there are no scalars and no graph for its own dashboards;
    all else is there.

    Args:
        logdir: where `tensorboard --logdir` finds the run, in a folder of its own.
        run: the run's name; None: the time. A name that is taken gets a number.
        rounds: how many are kept, the latest ones, at most.

    Yields:
        The run's folder.

    Raises:
        InvalidOption: the engine is being traced already, the folder cannot be made, or no run can have that name.
        EngineBusy: another call of the engine is under way.
        EngineClosed: it is closed.
    """
    recorder: Recorder | None = None
    try:
        recorder = _begin(engine, logdir, run, rounds)
        yield recorder.path
    finally:
        if recorder is not None:
            engine.recorder = None
            recorder.close()


@exclusive
def _begin(engine: Engine, logdir: str | Path, run: str | None, rounds: int) -> Recorder:
    engine._check_open()
    if engine.recorder is not None:
        allowed = "one trace of an engine at a time"
        raise InvalidOption("trace", str(logdir), allowed, f"Leave the one in {engine.recorder.path} first.")
    now = datetime.now(timezone.utc)
    name = now.strftime("%Y-%m-%d_%H-%M-%S") if run is None else run
    writer = RunWriter(logdir, name, run_info(engine, name, now), rounds)
    engine.recorder = Recorder(writer, engine._planner)
    return engine.recorder


def run_info(engine: Engine, name: str, started: datetime) -> RunInfo:
    """What is the same for all rounds of an engine."""
    planner, drafter = engine._planner, engine._speculator.drafter
    draft = None
    if drafter is not None:
        draft = SELF if drafter.model is planner.model else drafter.model.spec.name
    return RunInfo(
        name=name,
        started=started.isoformat(timespec="milliseconds"),
        kind="engine",
        machine=machine(planner.model.spec.device),
        versions=versions(),
        target=planner.model.spec.name,
        draft=draft,
        options=asdict(engine.options),
        memory=_bytes_by_class(engine.memory),
        link_bytes_per_us=planner.profile.host_to_device_bytes_per_us,
    )


def _bytes_by_class(memory: MemoryPlan) -> dict[str, int]:
    return {
        "weights": memory.weights,
        "draft_weights": memory.draft_weights,
        "draft_kv": memory.draft_kv,
        "drawn_from": memory.drawn_from,
        "ring": memory.ring,
        "blocks": memory.device_kv - memory.ring,
        "prompt_buffer": memory.prompt_buffer,
        "workspace": memory.workspace,
        "host_budget": memory.host_budget,
    }


ALIKE = 0.02
"""By what part of its bytes rounds may differ from one whose prediction is shown of them."""
MOST_WAITING = 64
"""Rounds that are kept until there is time to write them."""


@dataclass(frozen=True)
class _Round:
    """A round that is over, but for fetches ahead that may not have ended."""

    index: int
    spec: RoundSpec
    start: float
    seconds: float
    requests: tuple[RequestRound, ...]
    spans: list[TaskSpan]


class Recorder:
    """Writes each round when the next one is over: its fetches ahead have ended then, if any of them counted."""

    def __init__(self, writer: RunWriter, planner: Planner) -> None:
        self.path = writer.path
        self._writer, self._planner = writer, planner
        self._began = perf_counter()
        self._waiting: list[_Round] = []
        """The latest round, and those before it that there was no time for."""
        self._predicted: dict[tuple[RoundSpec, tuple[int, ...]], RoundSpec] = {}
        """The latest round that was predicted, by its canonical form and seating."""
        self._has_graph = False
        """Whether a verification was among the rounds."""
        self._works_ahead = False
        """Whether the executor leaves time in which a device computes."""
        self._lock = threading.Lock()
        """Its end may come in another thread than its rounds."""
        self._over = False

    def add(
        self, spec: RoundSpec, rows: list[RequestRows], start: float, seconds: float, spans: list[TaskSpan]
    ) -> None:
        """Takes a round that succeeded.

        Args:
            start: by `time.perf_counter`.
            spans: of its tasks; copies may still add to it.
        """
        requests = tuple(_request_round(row) for row in rows if row.error is None)  # else nothing of it counts
        with self._lock:
            if not self._over:
                index = self._waiting[-1].index + 1 if self._waiting else 0
                self._waiting.append(_Round(index, spec, start, seconds, requests, spans))
                self._write(but=MOST_WAITING if self._works_ahead else 1)

    def work_ahead(self) -> Iterator[bool]:
        """Writes rounds that are over while a device computes the next one; True after each."""
        self._works_ahead = True
        while len(self._waiting) > 1 and not self._over:
            with self._lock:
                self._write(but=len(self._waiting) - 1)
            yield True

    def close(self) -> None:
        """Writes the rest. Closing twice does nothing."""
        with self._lock:
            if not self._over:
                self._write(but=0)
            self._over = True

    def _write(self, but: int) -> None:
        """Writes what is waiting, but for so many rounds; with none left also what the writer has held back."""
        try:
            while len(self._waiting) > but:
                self._writer.add(self._recorded(self._waiting[0]))
                del self._waiting[0]
            if not but:
                self._writer.close()
        except OSError as error:
            self._over = True
            with suppress(OSError):
                self._writer.close()
            warn_caller(f"the trace in {self.path} ends early, and nothing else does: {error}")

    def _recorded(self, round_: _Round) -> RecordedRound:
        spec, start = round_.spec, round_.start
        planner, link = self._planner, self._planner.profile.host_to_device_bytes_per_us
        if not self._has_graph and not any(request.prompt_tokens for request in round_.requests):
            self._writer.add_graph(planner.plan(spec.canonical()))
            self._has_graph = True
        alike = self._alike(spec)

        def planned(number: int) -> PlannedRound:
            return planned_round(planner.exact(alike), number, link)

        return RecordedRound(
            index=round_.index,
            start_us=_us(start - self._began),
            duration_us=_us(round_.seconds),
            plan=self._writer.plan_id(alike, planned),
            streamed_bytes=spec.streamed_bytes,
            fetched_bytes=spec.fetched_bytes,
            requests=round_.requests,
            spans=tuple(
                MeasuredSpan(span.task, _us(span.start - start), _us(span.stop - start)) for span in list(round_.spans)
            ),
        )

    def _alike(self, spec: RoundSpec) -> RoundSpec:
        """The round whose prediction is shown of this one, too: histories grow, now one and now another request has a
        chunk to write out, and each round would soon have its own."""
        shared = spec.canonical(), spec.seating
        latest = self._predicted.get(shared)
        if latest is None or abs(latest.streamed_bytes - spec.streamed_bytes) > ALIKE * latest.streamed_bytes:
            latest = self._predicted[shared] = spec.with_offloads()
        return latest


def _request_round(row: RequestRows) -> RequestRound:
    return RequestRound(
        request_id=row.sequence.request_id,
        prompt_tokens=len(row.tokens) if row.prompt else 0,
        candidates=len(row.candidates.tokens),
        accepted=row.accepted,
        produced=len(row.produced),
        foreseen=row.foreseen,
    )


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(1e6 * seconds, 3)
