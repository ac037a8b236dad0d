"""Rounds for the attention kernels, on any device, and what they should give: `reference_attention` in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specstream.kernels.attention import (
    AttentionState,
    merge_states,
    pack_query,
    reference_attention,
    unpack_output,
)
from specstream.kernels.tiling import Tiling
from specstream.kernels.triton_attend import OwnRows, Seats, attend
from specstream.kernels.triton_merge import merge

NAN = float("nan")
INF = float("inf")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class AttentionCase:
    """One round: everything that no row may see is NaN."""

    query: Tensor
    kv: Tensor
    seats: Seats
    own: OwnRows
    scale: float

    @property
    def rows(self) -> list[range]:
        """The rows of each seat."""
        starts, counts = self.seats.row_start.tolist(), self.seats.row_count.tolist()
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def listed(self, seat: int) -> tuple[Tensor, Tensor]:
        """K and V that the seat lists, [kv_heads, keys, head_dim]."""
        keys, tokens = int(self.seats.key_count[seat]), self.kv.shape[3]
        blocks = self.kv[self.seats.block_table[seat, : -(-keys // tokens)].long()]
        key, value = blocks.transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, :keys]
        return key, value

    def expected(self, past: bool = True, own: bool = True) -> AttentionState:
        """The state over listed and own keys: float64 [num_heads, rows, head_dim] and [num_heads, rows]."""
        heads, num_rows, dim = self.query.shape
        state = AttentionState(
            torch.zeros(heads, num_rows, dim, dtype=torch.float64, device=self.query.device),
            torch.full((heads, num_rows), -INF, dtype=torch.float64, device=self.query.device),
        )
        for seat, rows in enumerate(self.rows):
            if not rows:
                continue
            packed = pack_query(self.query[:, rows.start : rows.stop].double(), self.kv.shape[2])
            result = AttentionState(torch.zeros_like(packed), torch.full_like(packed[..., 0], -INF))
            key, value = self.listed(seat)
            if past and key.shape[1]:
                part = reference_attention(packed, key.double()[None], value.double()[None], self.scale)
                result = merge_states(result, part)
            if own:
                bits = torch.arange(len(rows), device=self.query.device)
                words = self.own.ancestors[rows.start : rows.stop]
                mask = ((words[:, bits // 64] >> (bits % 64)) & 1).bool().repeat(heads // self.kv.shape[2], 1)
                key, value = (x[:, rows.start : rows.stop].double()[None] for x in (self.own.key, self.own.value))
                result = merge_states(result, reference_attention(packed, key, value, self.scale, mask[:, None]))
            state.out[:, rows.start : rows.stop] = unpack_output(result.out, heads)
            state.lse[:, rows.start : rows.stop] = unpack_output(result.lse[..., None], heads)[..., 0]
        return state

    def expected_kv(self) -> Tensor:
        """The store after the append."""
        kv, tokens = self.kv.clone(), self.kv.shape[3]
        for seat, rows in enumerate(self.rows):
            first = int(self.own.position[seat])
            for place, row in enumerate(rows, first):
                block = kv[int(self.own.append_table[seat, place // tokens - first // tokens])]
                block[0, :, place % tokens] = self.own.key[:, row]
                block[1, :, place % tokens] = self.own.value[:, row]
        return kv


def make_case(
    rows: Sequence[int],
    keys: Sequence[int],
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    tree: bool = False,
    spare_blocks: int = 2,
    device: str = "cpu",
) -> AttentionCase:
    """Seats of so many rows and keys, each at position `keys`, with padding around their rows and blocks in any order.

    `spare_blocks` come first and are listed by nobody.
    """
    num_rows, num_seats, heads = sum(rows) + 3, len(rows), kv_heads * group
    needed = [-(-(count + past) // tokens) for count, past in zip(rows, keys, strict=True)]
    order = torch.split(torch.randperm(sum(needed)) + spare_blocks, needed)
    kv = torch.full((spare_blocks + sum(needed), 2, kv_heads, tokens, head_dim), NAN, dtype=dtype, device=device)
    block_table = torch.full((num_seats, max(needed) + 1), spare_blocks - 1, dtype=torch.int32)
    append_table = torch.full((num_seats, max(rows, default=0) // tokens + 2), spare_blocks - 1, dtype=torch.int32)
    row_start = torch.tensor([2 + sum(rows[:seat]) for seat in range(num_seats)], dtype=torch.int32)
    ancestors = torch.zeros(num_rows, 2, dtype=torch.int64)
    query, key, value = (
        torch.full((num_rows, count, head_dim + 16), NAN, dtype=dtype, device=device).transpose(0, 1)[..., :head_dim]
        for count in (heads, kv_heads, kv_heads)
    )
    for seat, (count, past) in enumerate(zip(rows, keys, strict=True)):
        listed, appended = order[seat][: -(-past // tokens)], order[seat][past // tokens :]
        block_table[seat, : len(listed)] = listed
        append_table[seat, : len(appended)] = appended
        places = torch.arange(past)
        blocks, offsets = order[seat][places // tokens], places % tokens
        kv[blocks, :, :, offsets] = torch.randn(past, 2, kv_heads, head_dim, device=device).to(dtype)
        own = slice(int(row_start[seat]), int(row_start[seat]) + count)
        for given in (query, key, value):
            given[:, own] = torch.randn(given.shape[0], count, head_dim, device=device).to(dtype)
        ancestors[own] = tree_mask(count) if tree else chain_mask(count)
    return AttentionCase(
        query,
        kv,
        Seats(
            row_start.to(device),
            torch.tensor(rows, dtype=torch.int32, device=device),
            block_table.to(device),
            torch.tensor(keys, dtype=torch.int32, device=device),
            torch.zeros(num_seats, dtype=torch.int32, device=device),
        ),
        OwnRows(
            key,
            value,
            ancestors.to(device),
            torch.tensor(keys, dtype=torch.int32, device=device),
            append_table.to(device),
        ),
        head_dim**-0.5,
    )


def chain_mask(rows: int) -> Tensor:
    """Each row sees itself and the rows before it."""
    return _pack([set(range(row + 1)) for row in range(rows)])


def tree_mask(rows: int) -> Tensor:
    """Each row continues a random earlier one, or none."""
    seen: list[set[int]] = []
    for row in range(rows):
        parent = int(torch.randint(-1, row, ())) if row else -1
        seen.append({row} | (seen[parent] if parent >= 0 else set()))
    return _pack(seen)


def run_attend(case: AttentionCase, tiling: Tiling, own: bool = True, seats: Seats | None = None) -> AttentionState:
    """The parts that `attend` writes for the case's seats or the given ones; NaN where it writes nothing."""
    heads, rows, dim = case.query.shape
    shape = (tiling.splits + own, heads, rows)
    parts = AttentionState(
        torch.full((*shape, dim), NAN, device=case.query.device),
        torch.full(shape, NAN, device=case.query.device),
    )
    attend(case.query, case.kv, seats or case.seats, case.scale, tiling, parts, case.own if own else None)
    return parts


def run_merge(case: AttentionCase, parts: AttentionState) -> Tensor:
    """The output over all parts, strided."""
    heads, rows, dim = case.query.shape
    out = torch.full((rows, heads, dim), NAN, dtype=case.query.dtype, device=case.query.device).transpose(0, 1)
    merge(parts, case.seats, torch.full_like(case.seats.row_count, len(parts.out)), out)
    return out


def check_round(case: AttentionCase, tiling: Tiling) -> None:
    """Listed and own keys, merged, and the append: what a layer with everything resident needs."""
    tolerance = TOLERANCE[case.query.dtype]
    expected, appended = case.expected(), case.expected_kv()
    out = run_merge(case, run_attend(case, tiling))
    torch.testing.assert_close(out.double(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(case.kv, appended, atol=0.0, rtol=0.0, equal_nan=True)


def _pack(seen: list[set[int]]) -> Tensor:
    words = torch.zeros(len(seen), 2, dtype=torch.int64)
    for row, columns in enumerate(seen):
        for column in columns:
            bit = 1 << (column % 64)
            words[row, column // 64] |= bit - (1 << 64) if column % 64 == 63 else bit
    return words
