"""Which rows the draft computes next, found on the device: how many candidates were accepted is known only there.

A seat's rows in the first step are what the target has just committed and the draft has not computed yet, in later
ones the latest candidate. The draft has computed everything up to the last but one candidate that was verified, so that
these are at most two; or, where it is known beforehand what a seat has produced, up to the last token.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.accept import Seats
from specstream.kernels.triton_attend import Seats as Keys

TILE = 256
"""Entries of a block table written at a time."""


@dataclass(frozen=True)
class Verified:
    """What the target has made of the last candidates; all of it [seats]."""

    accepted: Tensor
    """int32; -1 for a seat that is not in this round."""
    produced: Tensor
    """int64 [seats, K + 1]: the tokens that follow."""
    length: Tensor
    """int64: tokens before those."""
    computed: Tensor
    """int32: of the candidates, how many the draft has computed; it has computed all tokens before them."""
    most_length: Tensor
    """int64: no token is proposed for a place from here on; 0 for a seat that is not drafted for."""


@dataclass(frozen=True)
class Window:
    """Where the draft's KV is: the first blocks stay, later ones are used in turn; sizes in tokens or blocks."""

    block_tokens: int
    sink_blocks: int
    ring_blocks: int
    tokens: int
    """The latest that must be there."""


@dataclass(frozen=True)
class DraftRows:
    """What the draft's model and attention read of a step; see `specstream.round_tables` for their shapes."""

    of_seat: int
    """How many a seat has in a step, used or not, 1 or 2: seat s those from `of_seat * s` on."""
    input_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    """int64 [at least seats]: each seat's last row."""
    keys: Keys
    position: Tensor
    append_table: Tensor


def place_rows(
    step: Tensor, verified: Verified, seats: Seats, slots: Tensor, window: Window, vocab: int, rows: DraftRows
) -> None:
    """Writes the rows of the next draft step, and which candidates there will be.

    Args:
        step: int64 [seats], the step before, from -1 on, the same for all seats; counted up.
        seats: `candidates_count` and `positions` are written; `candidates` holds those before this step.
        slots: int32 [seats, blocks], the store's block for each of a seat's places, sinks first.
        vocab: the draft's; what it has no embedding for it reads as token 0.
        rows: written. A seat that proposes nothing in this step has no rows.
    """
    count, blocks = slots.shape
    _place_kernel[(count,)](
        step,
        verified.accepted,
        verified.produced,
        verified.produced.stride(0),
        verified.length,
        verified.computed,
        verified.most_length,
        seats.candidates_count,
        seats.positions,
        seats.candidates,
        seats.candidates.stride(0),
        slots,
        blocks,
        vocab,
        window.tokens,
        window.sink_blocks,
        max(1, window.ring_blocks),
        rows.input_ids,
        rows.position_ids,
        rows.logit_rows,
        rows.keys.row_count,
        rows.keys.key_count,
        rows.keys.block_table,
        rows.keys.block_table.stride(0),
        rows.position,
        rows.append_table,
        rows.append_table.stride(0),
        DEPTH=seats.candidates.shape[1],
        ROWS=rows.of_seat,
        BLOCK_TOKENS=window.block_tokens,
        BLOCKS=min(triton.next_power_of_2(blocks), TILE),
        num_warps=1,
    )


@triton.jit
def _place_kernel(
    step: tl.tensor,
    accepted: tl.tensor,
    produced: tl.tensor,
    produced_stride: tl.tensor,
    length: tl.tensor,
    computed: tl.tensor,
    most_length: tl.tensor,
    candidates_count: tl.tensor,
    positions: tl.tensor,
    candidates: tl.tensor,
    candidates_stride: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    vocab: tl.tensor,
    window: tl.tensor,
    sinks: tl.tensor,
    ring: tl.tensor,
    input_ids: tl.tensor,
    position_ids: tl.tensor,
    logit_rows: tl.tensor,
    row_count: tl.tensor,
    key_count: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    position: tl.tensor,
    append_table: tl.tensor,
    append_stride: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program of one warp: one seat, whose steps it counts; no other may read what it counts up."""
    seat = tl.program_id(0)
    now = tl.load(step + seat) + 1
    tl.store(step + seat, now)
    kept = tl.load(accepted + seat).to(tl.int64)
    before = tl.load(length + seat)
    text = before + kept + 1
    proposed = tl.maximum(tl.minimum(tl.load(most_length + seat) - text, DEPTH), 0)
    proposed = tl.where(kept < 0, 0, proposed)
    tl.store(candidates_count + seat, proposed.to(tl.int32))
    tl.store(positions + seat, text)

    known = tl.minimum(tl.load(computed + seat).to(tl.int64), kept)
    first = tl.where(now == 0, before + known, text + now - 1)
    count = tl.where(now < proposed, tl.where(now == 0, text - first, 1), 0)
    index = tl.arange(0, ROWS)
    committed_at = produced + seat * produced_stride + known + index
    committed = tl.load(committed_at, mask=(now == 0) & (index < count), other=0)
    latest = tl.load(candidates + seat * candidates_stride + now - 1, mask=(now > 0) & (count > 0), other=0)
    token = tl.where(now == 0, committed, latest)
    token = tl.where((token >= 0) & (token < vocab), token, 0)
    tl.store(input_ids + seat * ROWS + index, tl.where(index < count, token, 0))
    tl.store(position_ids + seat * ROWS + index, tl.where(index < count, first + index, 0))
    tl.store(logit_rows + seat, seat * ROWS + tl.maximum(count - 1, 0))
    tl.store(row_count + seat, count.to(tl.int32))
    tl.store(position + seat, first.to(tl.int32))

    dropped = tl.maximum(tl.maximum(first - window, 0) // BLOCK_TOKENS - sinks, 0)
    tl.store(key_count + seat, (first - dropped * BLOCK_TOKENS).to(tl.int32))
    for start in tl.range(0, blocks, BLOCKS):
        entry = start + tl.arange(0, BLOCKS)
        chunk = tl.where(entry < sinks, entry, entry + dropped)
        block = _block_of(slots + seat * blocks, chunk, (entry < blocks) & (chunk * BLOCK_TOKENS < first), sinks, ring)
        tl.store(block_table + seat * table_stride + entry, block, mask=entry < blocks)
    own = first // BLOCK_TOKENS + index
    own_block = _block_of(slots + seat * blocks, own, own * BLOCK_TOKENS < first + count, sinks, ring)
    tl.store(append_table + seat * append_stride + index, own_block)


@triton.jit
def _block_of(slots: tl.tensor, chunk: tl.tensor, mask: tl.tensor, sinks: tl.tensor, ring: tl.tensor) -> tl.tensor:
    """The store's block of a seat's chunk."""
    slot = tl.where(chunk < sinks, chunk, sinks + (chunk - sinks) % ring)
    return tl.load(slots + slot, mask=mask, other=0)
