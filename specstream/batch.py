"""The data of one round, as against its structure: tokens, positions, lengths and whose KV is where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specstream.kv import SequenceKV


@dataclass(frozen=True)
class SeatRows:
    """The rows of one request in a round: rows [start, start + count) of the flattened tokens."""

    kv: SequenceKV
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


MIN_ROWS = 2
"""A captured graph is general in its number of rows from two on."""
ROW_STEP = 8
"""Rows of rounds on a device are padded to a multiple of it, or to 2 or 4, so that few sizes occur."""


@dataclass(frozen=True)
class FlatRows:
    """The rows of several requests, one after the other."""

    tokens: list[int]
    positions: list[int]
    wanted: list[int]
    """Rows whose logits are wanted, in order."""
    places: list[tuple[int, int]]
    """Each request's (start, count)."""

    @classmethod
    def of(cls, requests: Iterable[tuple[list[int], int, int]]) -> FlatRows:
        """Of each request: its tokens, the position of the first, and how many of the last ones need logits."""
        rows = cls([], [], [], [])
        for ids, first, logits in requests:
            rows.places.append((len(rows.tokens), len(ids)))
            rows.tokens.extend(ids)
            rows.positions.extend(range(first, first + len(ids)))
            rows.wanted.extend(range(len(rows.tokens) - logits, len(rows.tokens)))
        return rows

    @property
    def count(self) -> int:
        """How many there are with padding: as few as a captured graph takes."""
        return max(MIN_ROWS, len(self.tokens))

    def inputs(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """The model's, on the host or a device: input_ids and position_ids, int64 [1, count]; logit_rows, int64 [R]."""
        padding = [0] * (self.count - len(self.tokens))
        return {
            "input_ids": torch.tensor([self.tokens + padding], device=device),
            "position_ids": torch.tensor([self.positions + padding], device=device),
            "logit_rows": torch.tensor(self.wanted, dtype=torch.int64, device=device),
        }


class TaskSpan(NamedTuple):
    """When a task ran, in seconds of `time.perf_counter`."""

    task: str
    start: float
    stop: float


@dataclass(frozen=True)
class RoundBatch:
    """What a plan is run on.

    Rows that belong to no seat are padding: they are computed and never appended.
    """

    rows: FlatRows
    seats: dict[int, SeatRows]
    """Of the requests that have rows."""
    accept: Callable[[Tensor], None]
    """Called with the logits [R, vocab] when they are there."""
    draft: Callable[[int], None]
    """Called for each draft step, after acceptance or, if the plan says so, beside the target."""
    prepare: Callable[[], bool] = lambda: False
    """Called before the logits are there, once they are being computed; says whether the two only launch work."""
    settle: Callable[[], None] = lambda: None
    """Called at the end: waits for what these have launched."""
    others: dict[int, SequenceKV] = field(default_factory=dict)
    """KV of further requests, by seat: what the next round streams may be theirs."""
    work_ahead: Callable[[], bool] = lambda: False
    """Does some of what the host could do for the next round while a device computes this one; False if nothing is
    left. An executor without such a time need not call it."""
    spans: list[TaskSpan] | None = None
    """Where the executor notes when tasks ran, as far as it measures that; fetches ahead when they have ended, maybe
    after the round. None: nobody asks."""

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """The model's, on the host."""
        return self.rows.inputs()

    def kv_of(self, seat: int) -> SequenceKV:
        """That of the request in a seat, which has rows or is one of the others."""
        return self.seats[seat].kv if seat in self.seats else self.others[seat]


def wanted_logits(logits: Tensor, batch: RoundBatch) -> Tensor:
    """The rows that the batch asks for, [1, R, vocab], of logits for these or for all rows."""
    wanted = batch.rows.wanted
    count = len(wanted)
    if logits.shape[1] == count or not wanted or wanted[-1] == count - 1:  # the first ones
        return logits[:, :count]
    return logits[:, torch.tensor(wanted).to(logits.device, non_blocking=True)]


def padded_rows(rows: int) -> int:
    """The next number of rows that occurs on a device."""
    return next((few for few in (MIN_ROWS, 4) if rows <= few), -(-rows // ROW_STEP) * ROW_STEP)
