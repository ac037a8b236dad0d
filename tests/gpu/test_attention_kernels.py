"""The attention kernels compiled for a device: what the interpreter cannot show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specstream.kernels.attention import AttentionState
from specstream.kernels.tiling import Tiling, choose_tiling
from specstream.kernels.triton_attend import attend
from specstream.kernels.triton_merge import merge
from tests.attention_cases import (
    NAN,
    TOLERANCE,
    AttentionCase,
    check_round,
    make_case,
    run_attend,
    run_merge,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tiling_of(case: AttentionCase) -> Tiling:
    """The tiling that a layer of this size gets."""
    heads, _, dim = case.query.shape
    kv_heads = case.kv.shape[2]
    rows, keys = int(case.seats.row_count.max()), int(case.seats.key_count.max())
    return choose_tiling(len(case.rows), kv_heads, heads // kv_heads, rows, keys, dim, case.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_head_sizes_dtypes_and_rows(rows: int, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(
        [rows, 1, 0, 2], [3000, 256, 40, 0], 2, 4, head_dim, tokens=256, dtype=dtype, tree=True, device="cuda"
    )
    check_round(case, tiling_of(case))


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_sizes(group: int, dtype: torch.dtype) -> None:
    case = make_case([5, 2], [700, 100], 2, group, 64, tokens=64, dtype=dtype, device="cuda")
    check_round(case, tiling_of(case))


@pytest.mark.parametrize("tokens", [16, 48, 100, 256])
@pytest.mark.parametrize("block_rows", [16, 32, 64, 128])
def test_block_and_tile_sizes(block_rows: int, tokens: int) -> None:
    case = make_case([33, 3], [1000, 2 * tokens], 2, 4, 128, tokens=tokens, dtype=torch.bfloat16, device="cuda")
    for block_keys in (16, 32, 64):
        check_round(case, Tiling(block_rows, -(-33 * 4 // block_rows), block_keys, 3))


@pytest.mark.parametrize("tree", [False, True])
def test_the_most_rows_of_a_seat(tree: bool) -> None:
    case = make_case([128, 77], [2000, 33], 8, 4, 128, tokens=256, dtype=torch.bfloat16, tree=tree, device="cuda")
    check_round(case, tiling_of(case))


def test_eight_long_histories() -> None:
    case = make_case([5] * 8, [32768 - 7 * n for n in range(8)], 8, 4, 128, 256, torch.bfloat16, device="cuda")
    check_round(case, tiling_of(case))


def test_blocks_beyond_32_bit_offsets() -> None:
    """The store holds more than 2**31 elements before the blocks that are listed and appended to."""
    block = 2 * 8 * 256 * 128
    spare = 2**31 // block + 2
    case = make_case([5, 3], [600, 300], 8, 4, 128, 256, torch.bfloat16, spare_blocks=spare, device="cuda")
    assert int(case.seats.block_table[0, 0]) * block > 2**31
    expected = case.expected()
    out = run_merge(case, run_attend(case, tiling_of(case)))
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out.double(), expected.out, atol=tolerance, rtol=tolerance)
    row = case.rows[0].start
    appended = case.kv[int(case.own.append_table[0, 0]), :, :, 600 % 256]
    assert torch.equal(appended, torch.stack([case.own.key[:, row], case.own.value[:, row]]))
    assert case.kv[:4].isnan().all()  # where offsets that wrapped around would have written


def test_a_captured_round_replays_with_other_rows_lengths_and_tables() -> None:
    dtype, tolerance = torch.bfloat16, TOLERANCE[torch.bfloat16]
    sizes = [(5, 3000), (0, 17), (3, 256), (1, 1)]
    cases = [
        make_case([n for n, _ in order], [n for _, n in order], 8, 4, 128, 256, dtype, tree=True, device="cuda")
        for order in (sizes, sizes[::-1], sizes[2:] + sizes[:2])
    ]
    live, tiling = cases[0], tiling_of(cases[0])
    heads, rows, dim = live.query.shape
    parts = AttentionState(
        torch.full((tiling.splits + 1, heads, rows, dim), NAN, device="cuda"),
        torch.full((tiling.splits + 1, heads, rows), NAN, device="cuda"),
    )
    out, counts = torch.full_like(live.query, NAN), torch.full_like(live.seats.row_count, len(parts.out))

    def launch() -> None:
        attend(live.query, live.kv, live.seats, live.scale, tiling, parts, live.own)
        merge(parts, live.seats, counts, out)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case in cases:
        for target, source in zip(tensors(live), tensors(case), strict=True):
            target.copy_(source)
        expected, appended = live.expected(), live.expected_kv()
        parts.out.fill_(NAN)
        graph.replay()
        torch.testing.assert_close(out.double(), expected.out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(live.kv, appended, atol=0.0, rtol=0.0, equal_nan=True)


def tensors(case: AttentionCase) -> list[Tensor]:
    """All that a round's launches read."""
    return [case.query, case.kv, *vars(case.seats).values(), *vars(case.own).values()]
