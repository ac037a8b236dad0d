"""When the tasks of a round ran on a CUDA device: their ends, noted by a small kernel behind each.

Lanes run in order, so a task began when the one before it on its lane had ended, and all that it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from specstream.batch import TaskSpan
from specstream.kernels.stamp import stamp
from specstream.round_plan import Lane, Plan, StepOp
from specstream.round_spec import RoundSpec

BEGIN, DRAFTING = "begin", "drafting"
"""Beside the tasks: when the round began, and when its draft steps did."""
TRIES = 5
Ends = Mapping[str, float]
"""By task, in seconds of `time.perf_counter`."""


def spans_of(plan: Plan, ends: Ends) -> list[TaskSpan]:
    """The spans of tasks with these ends, also of those that were in flight when the round began, under its names."""
    ready = dict.fromkeys(Lane, ends[BEGIN])
    ready[Lane.DRAFT] = ends.get(DRAFTING, ends[BEGIN])
    spans = []
    for op, lane, name in plan.steps:
        if op is StepOp.WAIT and name in ends:
            ready[lane] = max(ready[lane], ends[name])
        elif op is StepOp.LAUNCH and name in ends:
            start, ready[lane] = min(ready[lane], ends[name]), ends[name]
            spans.append(TaskSpan(name, start, ends[name]))
    return spans


@dataclass
class _Table:
    """The ends of one plan's tasks, in nanoseconds of the device's clock, where its graphs write them."""

    plan: Plan
    device: torch.device
    place: dict[str, int] = field(init=False)
    times: Tensor = field(init=False)
    kept: Tensor = field(init=False)
    """What the times were before a round of the same plan began to write its own."""

    def __post_init__(self) -> None:
        names = (BEGIN, DRAFTING, *(task.name for task in self.plan.tasks if task.phase != "before"))
        self.place = {name: index for index, name in enumerate(names)}
        with torch.inference_mode(False):
            self.times = torch.zeros(len(names), dtype=torch.int64, device=self.device)
            self.kept = torch.zeros_like(self.times)


@dataclass
class _Traced:
    """A round whose fetches ahead had not all ended when it was read."""

    table: _Table
    spans: list[TaskSpan]
    end: float


class TaskTimes:
    """Of an executor's rounds, as long as they are asked for; each call is for the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[RoundSpec, _Table] = {}
        self._table: _Table | None = None
        self._spans: list[TaskSpan] = []
        self._before: _Traced | None = None
        self._offset: float | None = None
        """What is added to seconds of the device's clock."""

    @property
    def on(self) -> bool:
        """Whether the round's tasks note their ends."""
        return self._table is not None

    def begin(self, plan: Plan, spans: list[TaskSpan] | None) -> None:
        """A round of this plan begins; its spans go to the list, None if nobody asks."""
        if spans is None or self._table is not None:  # or a round was not read: later times are not its own
            self._before = None
        self._table = None
        if spans is None:
            return
        if self._offset is None:
            self._offset = _clock_offset(self.device)
        if plan.spec not in self._tables:
            self._tables[plan.spec] = _Table(plan, self.device)
        self._table, self._spans = self._tables[plan.spec], spans
        if self._before is not None:
            self._before.table.kept.copy_(self._before.table.times)

    def end(self, task: str) -> None:
        """Of a task, or `BEGIN` or `DRAFTING`."""
        if self._table is not None:
            stamp(self._table.times, self._table.place[task])

    def read(self) -> None:
        """Notes the spans of the round, which has ended but for fetches ahead, and of those of the round before."""
        table, before = self._table, self._before
        if table is None:
            return
        ends = self._ends(table, table.times)
        if before is not None:
            earlier = self._ends(before.table, before.table.kept)
            ahead = [task.name for task in before.table.plan.tasks if task.phase == "ahead"]
            then = {name: earlier[name] for name in ahead if earlier[name] > before.end}
            done = {span.task for span in before.spans}
            known = {span.task: span.stop for span in before.spans}
            spans = spans_of(before.table.plan, {BEGIN: earlier[BEGIN]} | known | then)
            before.spans += [span for span in spans if span.task in then and span.task not in done]
            in_flight = [task.name for task in table.plan.tasks if task.phase == "before"]
            ends |= {now: earlier[name] for now, name in zip(in_flight, ahead, strict=False)}
        end = perf_counter()
        since = {name: at for name, at in ends.items() if ends[BEGIN] <= at <= end or name not in table.place}
        self._spans += spans_of(table.plan, since)
        self._before = _Traced(table, self._spans, since.get("accept", ends[BEGIN]))
        self._table = None

    def _ends(self, table: _Table, times: Tensor) -> dict[str, float]:
        assert self._offset is not None
        return {name: time / 1e9 + self._offset for name, time in zip(table.place, times.tolist(), strict=True)}


def _clock_offset(device: torch.device) -> float:
    """Seconds of `perf_counter` when those of the device's clock are 0, by the quickest of a few looks."""
    times, looks = torch.zeros(1, dtype=torch.int64, device=device), []
    for _ in range(TRIES + 1):
        torch.cuda.current_stream(device).synchronize()
        start = perf_counter()
        stamp(times, 0)
        seen = int(times.item())
        stop = perf_counter()
        looks.append((stop - start, (start + stop) / 2 - seen / 1e9))
    return min(looks[1:])[1]  # the first compiles the kernel
