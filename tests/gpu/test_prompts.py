"""Prompts on a CUDA device: whole in a round or in parts, the tokens of the CPU path; states merged by one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specstream
from specstream.kernels.attention import AttentionState, merge_states
from specstream.kernels.cudnn_attention import PLANNED
from specstream.kernels.flash import flash_attention
from specstream.kernels.triton_merge_states import merge_into
from tests.architectures import build
from tests.helpers import Request, make_engine, prompt, serve


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
@pytest.mark.parametrize("batched", ["auto", 300, 64])
@pytest.mark.parametrize("budget", ["min", "1MiB"])
def test_tokens_are_those_of_the_cpu(name: str, batched: int | str, budget: str) -> None:
    """Float32, several prompts at once, the store's free memory NaN."""
    sizes: dict[str, Any] = {"head_dim": 64, "eos_token_id": None}
    target = build(name, torch.float32, 0, **sizes).to("cuda")
    options: dict[str, Any] = {"chunk_tokens": 16, "gpu_kv_budget": budget, "max_num_seqs": 2}
    options |= {"max_num_batched_tokens": batched, "max_model_len": 1024, "debug": True}
    requests = [Request(prompt(900), 5), Request(prompt(333), 9), Request(prompt(150), 5, joins=2)]
    make = specstream.compile if batched == "auto" else make_engine  # Inductor takes most of the time
    with make(target, None, **options) as engine:
        serve(engine, requests)
    with specstream.compile(build(name, torch.float32, 0, **sizes), None, max_model_len=1024) as alone:
        for request in requests:
            out: Any = alone.generate([list(request.prompt)], max_new_tokens=request.max_new_tokens)
            assert request.tokens == out[0, len(request.prompt) :].tolist()


def test_parts_in_half_precision_agree_with_the_whole() -> None:
    """Scores of the last row, in bfloat16 by the flash kernel; the parts merge in float32."""
    target = build("qwen3", torch.bfloat16, 0, eos_token_id=None, head_dim=64).to("cuda")
    scores, streamed = [], []
    for batched in (2048, 256):
        options: dict[str, Any] = {"chunk_tokens": 16, "gpu_kv_budget": "min", "max_num_batched_tokens": batched}
        with specstream.compile(target, None, max_model_len=2048, max_num_seqs=1, **options) as engine:
            out: Any = engine.generate(
                [list(prompt(1500))], max_new_tokens=1, return_dict_in_generate=True, output_logits=True
            )
            scores.append(out.requests[0].logits[0].double())
            streamed.append(engine.metrics().streamed_bytes)
    assert streamed[0] == 0 < streamed[1]
    spread = scores[0].std()
    assert (scores[0] - scores[1]).abs().max() < 0.1 * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 100, 1000, 1024, 1500])
def test_flash_over_parts_of_the_keys_is_flash_over_all(rows: int, dtype: torch.dtype) -> None:
    keys, heads, kv_heads, dim = 3 * PLANNED, 8, 2, 128  # so that cuDNN takes them from as many rows on
    query = torch.randn(rows, heads, dim, device="cuda", dtype=dtype).transpose(0, 1)
    key, value = torch.randn(2, kv_heads, keys + rows, dim, device="cuda", dtype=dtype)
    whole = flash_attention(query, key, value, dim**-0.5, causal=True)
    state = flash_attention(query, key[:, keys:], value[:, keys:], dim**-0.5, causal=True)
    for start in range(0, keys, PLANNED):
        span = slice(start, start + PLANNED)
        part = flash_attention(query, key[:, span], value[:, span], dim**-0.5, causal=False)
        expected = merge_states(in_float64(state), in_float64(part))
        merged = AttentionState(torch.empty_like(state.out, dtype=torch.float32), torch.empty_like(state.lse))
        merge_into(merged, state, part)
        torch.testing.assert_close(merged.out.double(), expected.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)
        state = merged
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(state.out, whole.out.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(state.lse, whole.lse, atol=1e-3, rtol=1e-3)


def in_float64(state: AttentionState) -> AttentionState:
    return AttentionState(state.out.double(), state.lse.double())
