"""The data of one round, as against its structure: tokens, positions, lengths and whose KV is where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class RoundBatch:
    """What a plan is run on.

    `inputs` are the model's, on the host: input_ids and position_ids, int64 [1, N], and logit_rows, int64 [R]. Rows
    that belong to no seat are padding: they are computed and never appended.
    """

    inputs: dict[str, Tensor]
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

    def kv_of(self, seat: int) -> SequenceKV:
        """That of the request in a seat, which has rows or is one of the others."""
        return self.seats[seat].kv if seat in self.seats else self.others[seat]


def wanted_logits(logits: Tensor, batch: RoundBatch) -> Tensor:
    """The rows that the batch asks for, [1, R, vocab], of logits for these or for all rows."""
    wanted = batch.inputs["logit_rows"]
    count = len(wanted)
    if logits.shape[1] == count or torch.equal(wanted, torch.arange(count)):
        return logits[:, :count]
    return logits[:, wanted.to(logits.device)]


MIN_ROWS = 2
"""A captured graph is general in its number of rows from two on."""
ROW_STEP = 8
"""Rows of rounds on a device are padded to a multiple of it, or to 2 or 4, so that few sizes occur."""


def padded_rows(rows: int) -> int:
    """The next number of rows that occurs on a device."""
    return next((few for few in (MIN_ROWS, 4) if rows <= few), -(-rows // ROW_STEP) * ROW_STEP)


def flatten_rows(
    rows: list[tuple[list[int], int, int]], device: torch.device | None = None
) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Packs the rows of several requests.

    Args:
        rows: for each request its tokens, the position of the first, and how many of the last ones need logits.
        device: where the inputs go; None for the host.

    Returns:
        The model's inputs, and each request's (start, count) of rows.
    """
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    places: list[tuple[int, int]] = []
    for ids, first, logits in rows:
        places.append((len(tokens), len(ids)))
        tokens += ids
        positions += range(first, first + len(ids))
        wanted += range(len(tokens) - logits, len(tokens))
    padding = max(0, MIN_ROWS - len(tokens))
    inputs = {
        "input_ids": torch.tensor([tokens + [0] * padding], device=device),
        "position_ids": torch.tensor([positions + [0] * padding], device=device),
        "logit_rows": torch.tensor(wanted, dtype=torch.int64, device=device),
    }
    return inputs, places
