"""The attention kernels under Triton's interpreter, against the torch reference in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specstream.kernels.attention import AttentionState, merge_states
from specstream.kernels.tiling import MAX_SPLITS, Tiling, choose_splits, choose_tiling
from specstream.kernels.triton_attend import Seats, attend
from specstream.kernels.triton_merge import merge
from tests.attention_cases import (
    INF,
    NAN,
    check_round,
    make_case,
    run_attend,
    run_merge,
)

pytestmark = pytest.mark.interpreter

SMALL = Tiling(block_rows=16, row_tiles=1, block_keys=16, splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    check_round(make_case([3], [37], kv_heads=1, head_dim=head_dim, dtype=dtype), SMALL)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_group_sizes(group: int) -> None:
    check_round(make_case([3], [21], group=group, head_dim=16), Tiling(16, -(-3 * group // 16), 16, 1))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 33, 128])
def test_rows_of_a_seat_under_the_mask(rows: int, tree: bool) -> None:
    tiling = choose_tiling(1, 1, 3, rows, 20, 16, torch.float16)
    check_round(make_case([rows], [20], kv_heads=1, group=3, head_dim=16, tree=tree), tiling)


@pytest.mark.parametrize("tokens", [16, 32, 48, 20, 5])
@pytest.mark.parametrize("block_keys", [16, 32])
def test_blocks_and_tiles_that_divide_or_do_not(tokens: int, block_keys: int) -> None:
    keys = [0, 1, tokens - 1, tokens, tokens + 1, 3 * tokens + 2]
    check_round(make_case([2] * 6, keys, kv_heads=1, tokens=tokens, head_dim=16), Tiling(16, 1, block_keys, 3))


def test_seats_of_different_sizes_and_empty_ones() -> None:
    case = make_case([3, 0, 17, 1, 0], [70, 30, 0, 1, 0], head_dim=16)
    check_round(case, Tiling(block_rows=16, row_tiles=3, block_keys=16, splits=4))


@pytest.mark.parametrize("splits", [1, 2, 5, 7])
def test_splits_share_the_keys_equally(splits: int) -> None:
    case = make_case([1, 1], [16 * 11 - 3, 16 * 3], kv_heads=1, head_dim=16)
    case.query.zero_()  # all scores are equal: the log-sum-exp counts the keys
    parts = run_attend(case, Tiling(16, 1, 16, splits), own=False)
    for seat, tiles in ((0, 11), (1, 3)):
        counts = parts.lse[:, 0, case.rows[seat].start].exp().round().int().tolist()
        assert sum(counts) == int(case.seats.key_count[seat])
        assert max(counts) <= -(-tiles // splits) * 16
        assert min(counts) >= tiles // splits * 16 - 3


def test_blocks_beyond_32_bit_offsets() -> None:
    """The store's pages before the case's blocks are never touched, so that they take no memory."""
    case = make_case([3], [40], kv_heads=1, head_dim=64, tokens=512, dtype=torch.float16)
    spare = 2**31 // case.kv[0].numel() + 1
    kv = torch.empty((spare + len(case.kv), *case.kv.shape[1:]), dtype=torch.float16)
    kv[spare:] = case.kv
    case.kv = kv
    case.seats.block_table.add_(spare)
    case.own.append_table.add_(spare)
    expected, row = case.expected(), case.rows[0].start
    out = run_merge(case, run_attend(case, SMALL))
    torch.testing.assert_close(out.double(), expected.out, atol=2e-3, rtol=2e-3)
    appended = kv[int(case.own.append_table[0, 0]), :, :, 40]
    assert torch.equal(appended, torch.stack([case.own.key[:, row], case.own.value[:, row]]))


def test_rows_of_no_seat_are_not_touched_and_give_zero() -> None:
    case = make_case([2, 0], [20, 20], head_dim=16)
    parts = run_attend(case, SMALL)
    padding = torch.ones(case.query.shape[1], dtype=torch.bool)
    padding[case.rows[0].start : case.rows[0].stop] = False
    assert parts.out[:, :, padding].isnan().all()
    assert (run_merge(case, parts)[:, padding] == 0).all()


def test_nan_in_a_row_is_not_hidden() -> None:
    case = make_case([2], [20], kv_heads=1, head_dim=16)
    case.query[0, case.rows[0].start] = NAN
    out = run_merge(case, run_attend(case, SMALL))
    assert out[0, case.rows[0].start].isnan().all()
    assert not out[1].isnan().any()


def test_a_nan_among_listed_keys_is_seen() -> None:
    """The twin of all tests that fill what is not listed with NaN."""
    case = make_case([2], [20], kv_heads=1, head_dim=16)
    case.kv[int(case.seats.block_table[0, 1]), 1, 0, 3] = NAN
    out = run_merge(case, run_attend(case, SMALL))
    assert out[:, case.rows[0].start].isnan().all()


def test_a_wrong_mask_changes_the_output() -> None:
    case = make_case([4], [20], kv_heads=1, head_dim=16)
    expected = case.expected()
    case.own.ancestors[case.rows[0].start + 2, 0] ^= 1
    out = run_merge(case, run_attend(case, SMALL))
    wrong = (out.double() - expected.out).abs().amax(dim=(0, 2)) > 1e-3
    assert wrong.nonzero().flatten().tolist() == [case.rows[0].start + 2]


def test_streamed_groups_add_to_the_parts_of_their_seat() -> None:
    """Own rows in one launch, each seat's keys in two or three of that seat alone, then the output of all of them."""
    case = make_case([3, 2], [80, 32], head_dim=16)
    everything, keys = case.expected(), case.seats.key_count.clone()
    case.seats.key_count.zero_()
    heads, rows, dim = case.query.shape
    parts = AttentionState(torch.full((9, heads, rows, dim), NAN), torch.full((9, heads, rows), NAN))
    attend(case.query, case.kv, case.seats, case.scale, SMALL, parts, case.own)
    counts = torch.tensor([3, 3], dtype=torch.int32)  # two splits without keys, and the own rows
    groups = [(seat, slice(first, first + 2)) for seat in (0, 1) for first in range(0, int(keys[seat]) // 16, 2)]
    assert len(groups) == 4
    for seat, blocks in groups:
        table = case.seats.block_table[seat : seat + 1, blocks]
        blocks_here = min(2, int(keys[seat]) // 16 - blocks.start)
        count = torch.tensor([blocks_here * 16], dtype=torch.int32)
        one, others = slice(seat, seat + 1), [row for row in range(rows) if row not in case.rows[seat]]
        seats = Seats(case.seats.row_start[one], case.seats.row_count[one], table, count, counts[one].clone())
        before = parts.lse.clone()
        attend(case.query, case.kv, seats, case.scale, SMALL, parts)
        counts[seat] += SMALL.splits
        assert torch.equal(parts.lse[:, :, others].nan_to_num(), before[:, :, others].nan_to_num())
    assert counts.tolist() == [9, 5]
    out = torch.full(case.query.shape, NAN)
    merge(parts, case.seats, counts, out)
    torch.testing.assert_close(out.double(), everything.out, atol=2e-5, rtol=2e-5)
    counts[0] -= SMALL.splits  # the twin: one group less is another result
    merge(parts, case.seats, counts, out)
    assert not torch.allclose(out[:, case.rows[0].start].double(), everything.out[:, case.rows[0].start], atol=1e-3)


def test_parts_without_keys_change_nothing() -> None:
    case = make_case([3], [20], head_dim=16)
    parts = run_attend(case, SMALL)
    case.seats.key_count.zero_()
    empty = run_attend(case, SMALL, own=False)
    own = slice(case.rows[0].start, case.rows[0].stop)
    assert (empty.lse[:, :, own] == -INF).all()
    assert (empty.out[:, :, own] == 0).all()
    both = AttentionState(torch.cat([parts.out, empty.out]), torch.cat([parts.lse, empty.lse]))
    assert torch.equal(run_merge(case, both), run_merge(case, parts))


def test_merging_empties_is_empty() -> None:
    case = make_case([3], [0], head_dim=16)
    assert (run_merge(case, run_attend(case, SMALL, own=False)) == 0).all()


@pytest.mark.parametrize("splits", [1, 3, 16, 17, 64])
def test_merge_agrees_with_the_reference(splits: int) -> None:
    case = make_case([3], [0], head_dim=80)
    heads, rows, dim = case.query.shape
    parts = AttentionState(torch.randn(splits, heads, rows, dim), torch.randn(splits, heads, rows) * 5)
    parts.lse[:, 0] = -INF  # a head that has seen no key
    parts.out[:, 0] = 0
    parts.lse[: splits // 2, 1] = -INF  # and one that has seen some only in later parts
    parts.out[: splits // 2, 1] = 0
    expected = AttentionState(torch.zeros(heads, rows, dim).double(), torch.full((heads, rows), -INF).double())
    for out, lse in zip(parts.out.double(), parts.lse.double(), strict=True):
        expected = merge_states(expected, AttentionState(out, lse))
    own = slice(case.rows[0].start, case.rows[0].stop)
    got = run_merge(case, parts)
    torch.testing.assert_close(got[:, own].double(), expected.out[:, own], atol=2e-6, rtol=2e-6)


def test_a_long_history_in_parts_equals_one_pass() -> None:
    case = make_case([2], [3072 + 64], kv_heads=1, group=1, head_dim=16, tokens=64)
    whole, table = case.expected(own=False), case.seats.block_table
    out = run_merge(case, run_attend(case, Tiling(16, 1, 64, 3), own=False))
    torch.testing.assert_close(out.double(), whole.out, atol=2e-6, rtol=2e-6)
    first, last = (
        Seats(case.seats.row_start, case.seats.row_count, blocks, torch.tensor([count], dtype=torch.int32), at)
        for blocks, count, at in ((table[:, :48], 3072, torch.tensor([0])), (table[:, 48:], 64, torch.tensor([3])))
    )
    parts = run_attend(case, Tiling(16, 1, 64, 4), own=False)
    parts.out.fill_(NAN)
    for seats, splits in ((last, 1), (first, 3)):
        attend(case.query, case.kv, seats, case.scale, Tiling(16, 1, 64, splits), parts)
    torch.testing.assert_close(run_merge(case, parts).double(), whole.out, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("shift", [-1e5, 1e5])
def test_scores_far_from_zero(shift: float) -> None:
    """Scores of about 1e5, all of them exact in float32, which differ by a few units."""
    case = make_case([2], [40], kv_heads=1, group=1, head_dim=16)
    own = slice(case.rows[0].start, case.rows[0].stop)
    case.query[:, own] = torch.tensor([256.0, 1.0] + [0.0] * 14)
    for keys in (case.kv[:, 0], case.own.key):
        keys[..., 0] = torch.where(keys[..., 0].isnan(), NAN, shift / 256)
        keys[..., 1] = keys[..., 1].mul(32).round().div(32)  # the sum with 1e5 takes 22 bits
    case.scale = 1.0
    one_part = run_attend(case, Tiling(16, 1, 16, 1), own=False)
    expected = case.expected(own=False)
    torch.testing.assert_close(one_part.out[0, :, own].double(), expected.out[:, own], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(one_part.lse[0, :, own].double(), expected.lse[:, own], atol=0.0, rtol=1e-7)
    expected = case.expected()
    out = run_merge(case, run_attend(case, SMALL))
    # Between parts, the weights are as exact as a float32 of 1e5: to 2**-8.
    torch.testing.assert_close(out.double(), expected.out, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_tilings_cover_all_rows(rows: int, head_dim: int, dtype: torch.dtype) -> None:
    for group in range(1, 17):
        tiling = choose_tiling(8, 8, group, rows, 32768, head_dim, dtype)
        assert tiling.block_rows * tiling.row_tiles >= group * rows > tiling.block_rows * (tiling.row_tiles - 1)
        assert 1 <= tiling.splits <= MAX_SPLITS
        assert tiling.block_rows >= 16 <= tiling.block_keys


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_splits(programs=64, key_tiles=512, slots=264) == 4  # one wave
    assert choose_splits(programs=8, key_tiles=512, slots=264) == 32
    assert choose_splits(programs=10_000, key_tiles=512, slots=264) == 1
    assert choose_splits(programs=1, key_tiles=1, slots=264) == 1
    assert choose_splits(programs=1, key_tiles=0, slots=264) == 1
