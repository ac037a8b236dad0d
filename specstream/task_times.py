"""When the tasks of a round ran on a CUDA device: their ends, noted by a small kernel or an event behind each.

Lanes run in order, so a task began when the one before it on its lane had ended, and all that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specstream.batch import TaskSpan
from specstream.kernels.stamp import stamp
from specstream.round_plan import Lane, Plan, StepOp, lane_of
from specstream.round_spec import RoundSpec
from specstream.streams import new_event, new_gate

BASE, BEGIN, DRAFTING = "base", "begin", "drafting"
"""Beside the tasks: when the round was launched, when it began, and when its draft steps did."""
COPY_LANES = (Lane.LINK, Lane.STORE)
TRIES = 5
Ends = dict[str, float]
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
    """Where the ends of one plan's tasks are noted, by its graphs too: kernels' in memory, copies' as events.

    A kernel behind a copy would hold up the next one, and whatever else is in its queue of the device.
    """

    plan: Plan
    device: torch.device
    place: dict[str, int] = field(init=False)
    times: Tensor = field(init=False)
    """In nanoseconds of the device's clock."""
    copies: dict[str, Any] = field(init=False)
    """Events; torch has no types for what is asked of them."""
    base: Any = field(init=False)
    """Recorded right after the round's `BASE` in `times`: an event tells no time but that since another one."""

    def __post_init__(self) -> None:
        tasks = [task for task in self.plan.tasks if task.phase != "before"]
        copies = [task.name for task in tasks if lane_of(task) in COPY_LANES]
        self.copies = {name: new_gate(timed=True) for name in copies}
        names = (BASE, BEGIN, DRAFTING, *(task.name for task in tasks if task.name not in self.copies))
        self.place, self.base = {name: index for index, name in enumerate(names)}, new_event(timed=True)
        with torch.inference_mode(False):
            self.times = torch.zeros(len(names), dtype=torch.int64, device=self.device)


@dataclass
class _Traced:
    """A round that was read, when some of its fetches ahead may not have ended."""

    table: _Table
    spans: list[TaskSpan]
    ends: dict[str, float]


class TaskTimes:
    """Of an executor's rounds, as long as they are asked for; each call is for the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[tuple[RoundSpec, int], _Table] = {}
        self._table: _Table | None = None
        self._turn = 0
        self._spans: list[TaskSpan] = []
        self._before: _Traced | None = None
        self._offset: float | None = None
        """What is added to seconds of the device's clock."""

    @property
    def turn(self) -> int:
        """Where the round's tasks note their ends: two places of a plan are used by turns, since those of copies that
        are in flight when a round is over are read when the next one is. 0: nowhere."""
        return self._turn if self._table is not None else 0

    def begin(self, plan: Plan, spans: list[TaskSpan] | None) -> None:
        """A round of this plan begins; its spans go to the list, None if nobody asks."""
        if spans is None or self._table is not None:  # or a round was not read: what was noted is not known to be its
            self._before = None
        self._table = None
        if spans is None:
            return
        if self._offset is None:
            self._offset = _clock_offset(self.device)
        self._turn = 2 if self._turn == 1 else 1
        key = plan.spec, self._turn
        if key not in self._tables:
            self._tables[key] = _Table(plan, self.device)
        self._table, self._spans = self._tables[key], spans
        self.end(BASE)
        self._table.base.record(torch.cuda.current_stream(self.device))

    def end(self, task: str) -> None:
        """Of a task, or `BEGIN` or `DRAFTING`."""
        table = self._table
        if table is None:
            return
        if task in table.copies:
            table.copies[task].record(torch.cuda.current_stream(self.device))
        else:
            stamp(table.times, table.place[task])

    def read(self) -> None:
        """Notes the spans of the round, which has ended but for fetches ahead, and of those of the round before."""
        table, before = self._table, self._before
        if table is None:
            return
        ends = self._ends(table)
        if before is not None:
            ahead = [task.name for task in before.table.plan.tasks if task.phase == "ahead"]
            then = self._copy_ends(before.table, before.ends, [name for name in ahead if name not in before.ends])
            before.spans += [span for span in spans_of(before.table.plan, before.ends | then) if span.task in then]
            in_flight = [task.name for task in table.plan.tasks if task.phase == "before"]
            known = before.ends | then
            ends |= {now: known[name] for now, name in zip(in_flight, ahead, strict=False) if name in known}
        self._spans += spans_of(table.plan, ends)
        self._before = _Traced(table, self._spans, ends)
        self._table = None

    def _ends(self, table: _Table) -> Ends:
        """Of what has ended in this round."""
        assert self._offset is not None
        times = {name: at / 1e9 + self._offset for name, at in zip(table.place, table.times.tolist(), strict=True)}
        kernels = {name: at for name, at in times.items() if at >= times[BASE]}  # else it did not run
        return kernels | self._copy_ends(table, kernels, table.copies)

    def _copy_ends(self, table: _Table, ends: Mapping[str, float], copies: Iterable[str]) -> Ends:
        """Of these copies, in a round whose kernels' ends are given."""
        noted = {name: table.copies[name] for name in copies if table.copies[name].cuda_event}
        done = {name: event for name, event in noted.items() if event.query()}
        since = {name: table.base.elapsed_time(event) / 1e3 for name, event in done.items()}
        return {name: ends[BASE] + seconds for name, seconds in since.items() if seconds >= 0}  # else it did not run


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
