"""Rows and keys as cuDNN is given them, with attention spelt out in its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specstream.kernels import cudnn_attention
from specstream.kernels.attention import AttentionState
from specstream.kernels.cudnn_attention import fits, in_planned_shapes
from specstream.kernels.flash import flash_attention

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.25


def inputs(rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(rows, HEADS, DIM).transpose(0, 1)
    key, value = torch.randn(2, KV_HEADS, keys, DIM)
    return query, key, value


@pytest.mark.parametrize(("rows", "keys", "causal"), [(16, 48, False), (17, 32, False), (16, 16, True), (41, 41, True)])
def test_rows_that_are_added_change_nothing(
    rows: int, keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention, "PLANNED", 16)
    shapes = []

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> AttentionState:
        shapes.append((query.shape[1], key.shape[1], value.shape[1]))
        assert query.stride() == (DIM, HEADS * DIM, 1)  # one plan, whether or not rows were added
        return flash_attention(query, key, value, scale, causal=causal)

    given = inputs(rows, keys)
    state = in_planned_shapes(attend, *given, SCALE, causal)
    expected = flash_attention(*given, SCALE, causal=causal)
    torch.testing.assert_close(state.out, expected.out)
    torch.testing.assert_close(state.lse, expected.lse)
    assert all(size % 16 == 0 for size in shapes[0])
    assert shapes[0][0] - rows < 16


def test_it_is_for_many_rows_of_half_precision_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    planned = cudnn_attention.PLANNED

    def taken(rows: int, keys: int, causal: bool, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> bool:
        query, key = (torch.empty(2, count, dim, dtype=dtype, device="meta") for count in (rows, keys))
        return fits(query, key, causal)

    assert taken(planned, 3 * planned, False)
    assert taken(planned + 1, planned + 1, True)
    assert not taken(planned - 1, planned, False)
    assert not taken(planned, planned + 1, False)
    assert not taken(planned, 2 * planned, True)
    assert not taken(planned, planned, True, torch.float32)
    assert not taken(planned, planned, True, dim=256)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert not taken(planned, planned, True)
