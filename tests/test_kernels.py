"""Partial attention and merges against one float64 softmax over all keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specstream.kernels.attention import (
    AttentionState,
    merge_states,
    pack_query,
    partial_attention,
    reference_attention,
    unpack_output,
)

INF = float("inf")

both = pytest.mark.parametrize("attend", [partial_attention, reference_attention])
Attend = Callable[..., AttentionState]


def chunks(count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, heads, tokens, dim, dtype=torch.float64).to(dtype)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q [heads, rows, dim], k and v [chunks, heads, tokens, dim], in one softmax."""
    keys, values = (x.double().transpose(0, 1).flatten(1, 2) for x in (k, v))
    scores = q.double() @ keys.transpose(1, 2) * scale
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


@both
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (3, 2, 5, 7, 16), (4, 8, 33, 3, 80), (2, 3, 17, 1, 128)])
def test_attention_over_chunks(
    attend: Attend, dtype: torch.dtype, tolerance: float, shape: tuple[int, int, int, int, int]
) -> None:
    count, heads, rows, tokens, dim = shape
    k, v = chunks(count, heads, tokens, dim, dtype), chunks(count, heads, tokens, dim, dtype)
    q = torch.randn(heads, rows, dim, dtype=torch.float64).to(dtype)
    state = attend(q, k, v, 0.3)
    out, lse = whole(q, k, v, 0.3)
    assert state.out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(state.out.double(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state.lse.double(), lse, atol=tolerance, rtol=tolerance)


@both
def test_a_mask_hides_keys_and_whole_rows(attend: Attend) -> None:
    q, k, v = torch.randn(2, 3, 8), chunks(2, 2, 4, 8, torch.float32), chunks(2, 2, 4, 8, torch.float32)
    mask = torch.ones(3, 2, 4, dtype=torch.bool)
    mask[0, 1] = False
    mask[2] = False
    state = attend(q, k, v, 1.0, mask)
    first = attend(q[:, :1], k[:1], v[:1], 1.0)
    torch.testing.assert_close(state.out[:, :1], first.out)
    assert torch.equal(state.out[:, 2], torch.zeros(2, 8))
    assert torch.equal(state.lse[:, 2], torch.full((2,), -INF))


def test_merging_a_split_equals_one_pass_in_any_order() -> None:
    q = torch.randn(2, 5, 16, dtype=torch.float64)
    k, v = chunks(49, 2, 64, 16, torch.float64), chunks(49, 2, 64, 16, torch.float64)
    once = partial_attention(q, k, v, 0.25)
    cut = [partial_attention(q, k[a:b], v[a:b], 0.25) for a, b in ((0, 48), (48, 49))]
    for order in (cut, cut[::-1]):
        merged = merge_states(*order)
        torch.testing.assert_close(merged.out, once.out, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(merged.lse, once.lse, atol=1e-12, rtol=1e-12)


def test_merging_two_empty_states_is_empty_and_one_empty_state_changes_nothing() -> None:
    empty = AttentionState(torch.zeros(2, 3, 4), torch.full((2, 3), -INF))
    both = merge_states(empty, empty)
    assert torch.equal(both.out, torch.zeros(2, 3, 4))
    assert torch.equal(both.lse, torch.full((2, 3), -INF))
    some = AttentionState(torch.randn(2, 3, 4), torch.randn(2, 3))
    for merged in (merge_states(empty, some), merge_states(some, empty)):
        torch.testing.assert_close(merged.out, some.out)
        torch.testing.assert_close(merged.lse, some.lse)


@both
@pytest.mark.parametrize("shift", [-1e5, 1e5])
def test_scores_far_from_zero(attend: Attend, shift: float) -> None:
    q, v = torch.ones(1, 2, 1), chunks(2, 1, 3, 1, torch.float32)
    k = torch.full((2, 1, 3, 1), shift) + torch.randn(2, 1, 3, 1)
    out, _ = whole(q, k, v, 1.0)
    merged = merge_states(attend(q, k[:1], v[:1], 1.0), attend(q, k[1:], v[1:], 1.0))
    torch.testing.assert_close(merged.out.double(), out, atol=2e-2, rtol=2e-2)


def test_packing_keeps_the_heads_of_a_group_with_their_kv_head() -> None:
    query = torch.randn(6, 5, 4)
    packed = pack_query(query, 2)
    assert packed.shape == (2, 15, 4)
    assert torch.equal(packed[1, 5:10], query[4])
    assert torch.equal(unpack_output(packed, 6), query)
