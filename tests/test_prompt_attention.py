"""Attention of long prompts as a CUDA device computes it, with attention spelt out and Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specstream.kernels.attention import AttentionState, merge_states
from specstream.kernels.triton_merge_states import BLOCK_ROWS, merge_into
from specstream.prompt_attention import PromptAttention
from tests.attention_cases import INF, NAN
from tests.helpers import Request, cpu_executor, make_engine, model, prompt, reference, serve

pytestmark = pytest.mark.interpreter


def random_state(heads: int, rows: int, dim: int, dtype: torch.dtype, strided: bool = False) -> AttentionState:
    """A state whose out is [rows, heads, dim] in memory with gaps, as the flash kernel writes it, or contiguous."""
    lse_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    lse = torch.randn(heads, rows + 3 * strided, dtype=lse_dtype)[:, :rows] * 5
    out = torch.randn(rows, heads + strided, dim, dtype=dtype)[:, :heads].transpose(0, 1)
    return AttentionState(out if strided else out.contiguous(), lse)


def in_float64(state: AttentionState) -> AttentionState:
    return AttentionState(state.out.double(), state.lse.double())


def assert_states_equal(actual: AttentionState, expected: AttentionState, tolerance: float) -> None:
    torch.testing.assert_close(actual.out.double(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual.lse.double(), expected.lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, BLOCK_ROWS, 2 * BLOCK_ROWS + 3])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 80), (2, 128)])
def test_merged_states_are_the_references(heads: int, dim: int, rows: int, dtype: torch.dtype, strided: bool) -> None:
    a, b = (random_state(heads, rows, dim, dtype, strided) for _ in range(2))
    merged = random_state(heads, rows, dim, torch.float64 if dtype is torch.float64 else torch.float32, strided)
    merge_into(merged, a, b)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    assert_states_equal(merged, merge_states(in_float64(a), in_float64(b)), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_accumulates_in_place(dtype: torch.dtype) -> None:
    state = random_state(2, 20, 48, torch.float32, strided=True)
    expected = in_float64(state)
    for _ in range(5):
        part = random_state(2, 20, 48, dtype)
        expected = merge_states(expected, in_float64(part))
        merge_into(state, state, part)
    assert_states_equal(state, expected, 1e-5)


def test_a_result_in_half_precision_is_rounded_once() -> None:
    a, b = (random_state(2, 20, 64, torch.float16) for _ in range(2))
    merged = AttentionState(torch.empty_like(a.out), torch.empty_like(a.lse))
    merge_into(merged, a, b)
    expected = merge_states(in_float64(a), in_float64(b))
    torch.testing.assert_close(merged.out.double(), expected.out, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
def test_what_rows_without_keys_hold_is_not_used(which: tuple[bool, bool]) -> None:
    states = []
    for empty in which:
        state = random_state(2, 5, 16, torch.float32)
        if empty:
            state.lse[1, 3], state.out[1, 3] = -INF, NAN
        states.append(state)
    merged = random_state(2, 5, 16, torch.float32)
    merge_into(merged, *states)
    if all(which):
        assert merged.lse[1, 3] == -INF
        assert not merged.out[1, 3].any()
    else:
        other = states[which[0]]
        torch.testing.assert_close(merged.out[1, 3], other.out[1, 3])
        torch.testing.assert_close(merged.lse[1, 3], other.lse[1, 3])
    assert not merged.out.isnan().any()


def test_large_scores_and_nan() -> None:
    a, b = (random_state(1, 4, 16, torch.float32) for _ in range(2))
    a.lse[0] = torch.tensor([-1e5, 1e5, 0.0, NAN])
    b.lse[0] = torch.tensor([-1e5, 0.0, 1e5, 0.0])
    merged = random_state(1, 4, 16, torch.float32)
    merge_into(merged, a, b)
    torch.testing.assert_close(merged.out[0, 0], (a.out[0, 0] + b.out[0, 0]) / 2)
    assert torch.equal(merged.out[0, 1], a.out[0, 1])
    assert torch.equal(merged.out[0, 2], b.out[0, 2])
    assert merged.out[0, 3].isnan().all(), "NaN is not hidden"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"gpu_kv_budget": "min", "max_num_seqs": 1}),
        ("llama3", {"gpu_kv_budget": "32KiB", "max_num_batched_tokens": 21, "max_num_seqs": 3}),
        ("qwen3", {"gpu_kv_budget": "auto", "max_num_batched_tokens": 21, "max_num_seqs": 3}),
    ],
)
def test_tokens_are_those_of_the_target_alone(name: str, options: dict[str, Any]) -> None:
    """In float64, where it serves verifications too."""
    target = model(name, layers=2)
    engine = make_engine(target, target, debug=True, **{"max_model_len": 96, "chunk_tokens": 5} | options)
    attention = PromptAttention(engine._executor.store)
    cpu_executor(engine)._choose_attention = lambda spec, batch: attention
    with engine:
        requests = [Request(prompt(62), 5), Request(prompt(5), 6, joins=1), Request(prompt(77), 3, joins=2)]
        serve(engine, requests)
    for request in requests:
        assert request.tokens == reference(target, request.prompt, request.max_new_tokens).tokens


def test_own_rows_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of a prompt attends to K and V as the model made them: nothing is copied or merged."""
    from specstream import prompt_attention

    def refuse(*_: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError

    monkeypatch.setattr(prompt_attention, "join_chunks", refuse)
    monkeypatch.setattr(prompt_attention, "merge_into", refuse)
    engine = make_engine(model("qwen3", layers=2), max_model_len=96, chunk_tokens=5, gpu_kv_budget="min")
    attention = PromptAttention(engine._executor.store)
    cpu_executor(engine)._choose_attention = lambda spec, batch: attention
    with engine:
        out: Any = engine.generate([list(prompt(70))], max_new_tokens=1)
    assert out[0, 70:].tolist() == reference(model("qwen3", layers=2), prompt(70), 1).tokens
