"""Attention launches that merge their own results, under Triton's interpreter: its programs run in the grid's order."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specstream.kernels import triton_merge_rows
from specstream.kernels.attention import AttentionState
from specstream.kernels.tiling import Tiling, choose_tiling, merges_itself
from specstream.kernels.triton_attend import attend
from specstream.kernels.triton_merge_rows import merge_block
from tests.attention_cases import (
    NAN,
    check_round,
    make_case,
    merged_output,
    run_attend,
    run_merge,
    run_merged,
)

pytestmark = pytest.mark.interpreter

SMALL = Tiling(block_rows=16, row_tiles=1, block_keys=16, splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([3], [37], kv_heads=1, head_dim=head_dim, dtype=dtype, tree=True)
    check_round(case, SMALL, merged=True)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_group_sizes(group: int) -> None:
    case = make_case([3], [21], group=group, head_dim=16)
    check_round(case, Tiling(16, -(-3 * group // 16), 16, 1), merged=True)


@pytest.mark.parametrize("values", [1, 64, 1 << 14])
@pytest.mark.parametrize("splits", [1, 4, 6])
def test_seats_of_different_sizes_and_empty_ones(splits: int, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows and parts are merged at a time, and whether or not a split has keys."""
    monkeypatch.setattr(triton_merge_rows, "VALUES_AT_ONCE", values)
    case = make_case([3, 0, 17, 1, 0], [70, 30, 0, 1, 0], head_dim=16)
    check_round(case, Tiling(block_rows=16, row_tiles=3, block_keys=16, splits=splits), merged=True)


@pytest.mark.parametrize("group", [1, 3])
def test_the_output_is_that_of_the_kernel_that_merges(group: int) -> None:
    case = make_case([2, 5], [100, 3], group=group, head_dim=32)
    tiling = Tiling(16, 1, 16, 5)
    torch.testing.assert_close(run_merged(case, tiling), run_merge(case, run_attend(case, tiling)))


def test_rows_of_no_seat_give_zero() -> None:
    """Before, between and after those of seats: as in a draft step, whose seats have a row or two of their two."""
    case = make_case([2] * 9, [20] * 9, head_dim=16)
    case.seats.row_count[1::2] = 1
    case.seats.row_count[4] = 0
    padding = torch.ones(case.query.shape[1], dtype=torch.bool)
    for rows in case.rows:
        padding[rows.start : rows.stop] = False
    assert padding.sum() == 3 + 4 + 2
    out = run_merged(case, SMALL)
    assert (out[:, padding] == 0).all()
    assert (out[:, ~padding] != 0).any(-1).all()


def test_rows_of_no_seat_give_zero_where_no_seat_has_rows() -> None:
    assert (run_merged(make_case([0, 0], [20, 0], head_dim=80), SMALL) == 0).all()


def test_rows_without_keys_give_zero() -> None:
    assert (run_merged(make_case([3], [0], head_dim=16), SMALL, own=False) == 0).all()


def test_nan_in_a_row_is_not_hidden() -> None:
    case = make_case([2], [20], kv_heads=1, head_dim=16)
    case.query[0, case.rows[0].start] = NAN
    out = run_merged(case, SMALL)
    assert out[0, case.rows[0].start].isnan().all()
    assert not out[1].isnan().any()


def test_the_parts_that_are_merged_are_those_of_the_launch() -> None:
    case = make_case([2], [40], head_dim=16)
    expected, merged, (heads, rows, dim) = case.expected().out, merged_output(case, SMALL), case.query.shape
    case.seats.first_part.fill_(2)
    parts = AttentionState(torch.full((6, heads, rows, dim), NAN), torch.full((6, heads, rows), NAN))
    attend(case.query, case.kv, case.seats, case.scale, SMALL, parts, case.own, merged)
    torch.testing.assert_close(merged.out.double(), expected, atol=2e-5, rtol=2e-5)


def test_launches_follow_each_other_on_the_same_counters() -> None:
    case = make_case([3, 1], [70, 20], head_dim=16)
    merged = merged_output(case, SMALL)
    results = []
    for _ in range(2):
        merged.out.fill_(NAN)
        run_attend(case, SMALL, merged=merged)
        results.append(merged.out.clone())
        assert not merged.arrived.any()
    assert torch.equal(*results)


def test_programs_that_are_counted_twice_are_not_waited_for() -> None:
    """The twin: a counter that does not begin at 0, and whose last program is therefore not the last."""
    case = make_case([3, 1], [70, 20], head_dim=16)
    merged = merged_output(case, SMALL)
    merged.arrived[0, 1, 0] = 1
    run_attend(case, SMALL, merged=merged)
    wrong = merged.out.isnan().any(-1)
    assert wrong[2:, case.rows[0].start : case.rows[0].stop].all()
    assert wrong.sum() == 2 * 3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("parts", [1, 5, 33, 65])
def test_what_is_merged_at_a_time_are_powers_of_two_within_bounds(parts: int, head_dim: int) -> None:
    for rows in (1, 16, 64):
        at_once = merge_block(parts, rows, head_dim)
        assert all(number & (number - 1) == 0 for number in at_once)
        assert at_once[0] * at_once[1] * head_dim <= 2 * triton_merge_rows.VALUES_AT_ONCE
        assert at_once[1] <= rows


def test_much_is_merged_by_a_launch_of_its_own() -> None:
    def merges(seats: int, group: int, rows: int, keys: int) -> bool:
        tiling = choose_tiling(seats, 8, group, rows, keys, 128, torch.bfloat16)
        return merges_itself(tiling, group * rows, 128)

    assert merges(seats=1, group=2, rows=2, keys=32768)  # a draft step
    assert merges(seats=8, group=4, rows=8, keys=32768)  # many seats, few parts
    assert not merges(seats=1, group=4, rows=8, keys=32768)
    assert merges(seats=1, group=4, rows=8, keys=512)
