"""Partial attention of a round's rows over blocks of the KV store, for CUDA devices (Triton).

A round's rows of different requests, the *seats*, lie side by side. One launch attends, for every seat, to the keys of
its listed blocks, cut into `splits` equal parts, and leaves one partial result a split; `triton_merge` puts those of
several launches together. Given the round's own K and V, one more part attends to them under the ancestor mask and
writes them into the store. Nothing is allocated and the host reads nothing, so that launches can be captured in a CUDA
graph (after one that compiles the kernel) and replayed with other rows, lengths and tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specstream.kernels.attention import AttentionState
from specstream.kernels.tiling import Tiling


@dataclass(frozen=True)
class Seats:
    """Which rows each seat has, and which keys they see; int32, on the device. Rows of no seat are padding."""

    row_start: Tensor
    """[seats]"""
    row_count: Tensor
    """[seats]; 0 for a seat that takes no part."""
    block_table: Tensor
    """[seats, max_blocks]: the blocks of its keys in order. What is listed beyond `key_count` keys is never read."""
    key_count: Tensor
    """[seats]: keys that all its rows see, the first ones of the listed blocks."""
    first_part: Tensor
    """[seats]: which partial result of the seat's rows the first split is."""


@dataclass(frozen=True)
class OwnRows:
    """K and V of the round's own rows, which rows see which, and where in the store they are written."""

    key: Tensor
    """[kv_heads, rows, head_dim], the last dimension contiguous."""
    value: Tensor
    """As `key`."""
    ancestors: Tensor
    """int64 [rows, 2]: bit j % 64 of word j // 64 is set if the row sees the j-th row of its seat."""
    position: Tensor
    """int32 [seats]: the place in the text of the seat's first row."""
    append_table: Tensor
    """int32 [seats, append_blocks]: the blocks of the rows, from the one that `position` falls into on."""


def attend(
    query: Tensor,
    kv: Tensor,
    seats: Seats,
    scale: float,
    tiling: Tiling,
    parts: AttentionState,
    own: OwnRows | None = None,
) -> None:
    """Partial attention of every seat's rows over its listed keys and, as one more part, over the round's own rows.

    Args:
        query: [num_heads, rows, head_dim], the last dimension contiguous; float16, bfloat16 or float32.
        kv: [blocks, 2, kv_heads, tokens, head_dim], contiguous, in the query's dtype. With `own`, its rows are
            written into it; no listed key may be one of them.
        scale: factor on the scores, above 0.
        tiling: see `choose_tiling`; made for at least the rows that any seat will have.
        parts: out float32 [parts, num_heads, rows, head_dim] and lse float32 [parts, num_heads, rows], natural
            logarithm, both contiguous. For the rows of a seat those from `seats.first_part` on are written, as many
            as `tiling.splits`, one more with `own`; the rest is left as it is. A row that saw no key has 0 and -inf.
        own: the round's own rows, at most `MAX_OWN_ROWS` a seat.
    """
    num_heads, num_rows, head_dim = query.shape
    _, _, kv_heads, tokens, _ = kv.shape
    num_parts = tiling.splits + (own is not None)
    assert kv.is_contiguous()
    assert parts.out.is_contiguous()
    assert parts.lse.is_contiguous()
    assert parts.out.shape == (len(parts.out), num_heads, num_rows, head_dim)
    assert parts.lse.shape == parts.out.shape[:3]
    assert len(parts.out) >= num_parts
    assert query.stride(2) == seats.block_table.stride(1) == 1
    if own is not None:
        assert own.key.stride(2) == own.value.stride(2) == own.append_table.stride(1) == 1
        assert own.ancestors.is_contiguous()
    given = own or OwnRows(query, query, seats.row_start, seats.row_start, seats.block_table)  # not read without `own`
    grid = (tiling.row_tiles * kv_heads, seats.row_start.shape[0], num_parts)
    _attend_kernel[grid](
        query,
        kv,
        seats.row_start,
        seats.row_count,
        seats.block_table,
        seats.key_count,
        seats.first_part,
        given.key,
        given.value,
        given.ancestors,
        given.position,
        given.append_table,
        parts.out,
        parts.lse,
        scale,
        num_rows,
        tiling.splits,
        tiling.row_tiles,
        query.stride(0),
        query.stride(1),
        given.key.stride(0),
        given.key.stride(1),
        given.value.stride(0),
        given.value.stride(1),
        seats.block_table.stride(0),
        given.append_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_KEYS=tiling.block_keys,
        OWN=own is not None,
        WIDEN=query.dtype == torch.bfloat16 and not query.is_cuda,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows", "splits", "row_tiles"])  # all change with the seats
def _attend_kernel(
    query: tl.tensor,
    kv: tl.tensor,
    row_start: tl.tensor,
    row_count: tl.tensor,
    block_table: tl.tensor,
    key_count: tl.tensor,
    first_part: tl.tensor,
    own_key: tl.tensor,
    own_value: tl.tensor,
    ancestors: tl.tensor,
    position: tl.tensor,
    append_table: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.tensor,
    splits: tl.tensor,
    row_tiles: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    table_stride: tl.tensor,
    append_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    OWN: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One program: a tile of packed rows of one seat and KV head, and one part of the keys."""
    tile = tl.program_id(0) % row_tiles  # programs that read the same keys run side by side
    kv_head = (tl.program_id(0) // row_tiles).to(tl.int64)
    seat = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(row_start + seat)
    count = tl.load(row_count + seat)
    keys = tl.load(key_count + seat)
    if tile * BLOCK_ROWS >= count * GROUP:
        return

    packed = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # all heads of the group for a row, then the next row
    row_valid = packed < count * GROUP
    row = (first_row + packed // GROUP).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, PADDED_DIM)
    dim_valid = dim < HEAD_DIM
    row_mask = row_valid[:, None] & dim_valid[None, :]
    query_at = query + head * query_head_stride + row * query_row_stride
    q = tl.load(query_at[:, None] + dim[None, :], mask=row_mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    score_scale = scale * 1.4426950408889634  # log2(e): weights are powers of 2
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, PADDED_DIM], tl.float32)

    # The part of the listed keys, to a whole tile. The part after the last split, for the own rows, gets none.
    key_tiles = tl.cdiv(keys, BLOCK_KEYS)
    first_tile = key_tiles * split // splits
    last_tile = tl.minimum(key_tiles * (split + 1) // splits, key_tiles)
    head_kv = kv + kv_head * (TOKENS * HEAD_DIM)
    VALUES: tl.constexpr = KV_HEADS * TOKENS * HEAD_DIM  # from K to V in a block
    table = block_table + seat * table_stride
    # Looked up a tile ahead: as a load of the same tile, Triton's pipeline would wait for it before it loads K and V.
    block = _blocks_of_tile(table, first_tile, keys, TOKENS, BLOCK_KEYS)
    for key_tile in tl.range(first_tile, last_tile):
        key = key_tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        key_valid = key < keys
        key_at = block * (2 * VALUES) + (key % TOKENS) * HEAD_DIM
        block = _blocks_of_tile(table, key_tile + 1, keys, TOKENS, BLOCK_KEYS)
        key_mask = key_valid[:, None] & dim_valid[None, :]
        k = tl.load(head_kv + key_at[:, None] + dim[None, :], mask=key_mask, other=0.0)
        v = tl.load(head_kv + VALUES + key_at[:, None] + dim[None, :], mask=key_mask, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        top, total, acc = _absorb(q, k, v, key_valid[None, :], score_scale, top, total, acc)

    if OWN:
        OWN_KEYS: tl.constexpr = min(BLOCK_KEYS, 32)  # few registers; and a tile lies in one word of the mask
        own_count = tl.where(split == splits, count, 0)
        first_position = tl.load(position + seat)
        for first_key in tl.range(0, own_count, OWN_KEYS, num_stages=1):
            key = first_key + tl.arange(0, OWN_KEYS)
            key_valid = key < own_count
            key_mask = key_valid[:, None] & dim_valid[None, :]
            own_row = (first_row + key).to(tl.int64)
            key_at = own_key + kv_head * key_head_stride + own_row * key_row_stride
            value_at = own_value + kv_head * value_head_stride + own_row * value_row_stride
            k = tl.load(key_at[:, None] + dim[None, :], mask=key_mask, other=0.0)
            v = tl.load(value_at[:, None] + dim[None, :], mask=key_mask, other=0.0)
            if tile == 0:
                place = first_position + key
                slot = place // TOKENS - first_position // TOKENS
                target = tl.load(append_table + seat * append_stride + slot, mask=key_valid, other=0).to(tl.int64)
                store_at = head_kv + target * (2 * VALUES) + (place % TOKENS) * HEAD_DIM
                tl.store(store_at[:, None] + dim[None, :], k, mask=key_mask)
                tl.store(store_at[:, None] + VALUES + dim[None, :], v, mask=key_mask)
            word = tl.load(ancestors + row * 2 + first_key // 64, mask=row_valid, other=0)
            seen = (word[:, None] >> (key % 64).to(tl.int64)[None, :]) & 1
            if WIDEN:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            visible = (seen != 0) & key_valid[None, :]
            top, total, acc = _absorb(q, k, v, visible, score_scale, top, total, acc)

    saw = total != 0.0  # also of NaN, which must not pass for a row that saw nothing
    out = acc / tl.where(saw, total, 1.0)[:, None]
    lse = tl.where(saw, top * scale + tl.log(tl.where(saw, total, 1.0)), float("-inf"))
    part = (tl.load(first_part + seat) + split).to(tl.int64)
    part_row = (part * (KV_HEADS * GROUP) + head) * num_rows + row
    tl.store(part_out + (part_row * HEAD_DIM)[:, None] + dim[None, :], out, mask=row_mask)
    tl.store(part_lse + part_row, lse, mask=row_valid)


@triton.jit
def _blocks_of_tile(
    table: tl.tensor, key_tile: tl.tensor, keys: tl.tensor, TOKENS: tl.constexpr, BLOCK_KEYS: tl.constexpr
) -> tl.tensor:
    """The block of a tile's keys as int64: one number if the tile lies in one block, else one a key."""
    if TOKENS % BLOCK_KEYS == 0:
        key = key_tile * BLOCK_KEYS
    else:
        key = key_tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    return tl.load(table + key // TOKENS, mask=key < keys, other=0).to(tl.int64)


@triton.jit
def _absorb(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    visible: tl.tensor,
    score_scale: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over one more tile of keys. `top` is the largest score before scaling."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key: -inf - -inf is NaN
    # Differences first, then the scale: scores far from zero lose nothing more.
    weights = tl.exp2((scores - base[:, None]) * score_scale)
    kept = tl.exp2((top - base) * score_scale)
    total = total * kept + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return new_top, total, acc
