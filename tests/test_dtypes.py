"""Half precision: every token is the model's own choice, but for near-ties of its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.architectures import build
from tests.helpers import make_engine, prompt

NEW_TOKENS = 24
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Gap below which two logits count as a tie, relative to the largest."""


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("budget", ["min", "auto"])
def test_tokens_are_the_models_own_but_for_near_ties(dtype: torch.dtype, budget: str) -> None:
    target, draft = build("qwen3", dtype), build("qwen3", dtype, seed=1)
    with make_engine(
        target, draft, chunk_tokens=8, max_model_len=128, gpu_kv_budget=budget, num_speculative_tokens=3, debug=True
    ) as engine:
        output: Any = engine.generate([list(prompt(50))], max_new_tokens=NEW_TOKENS)
    with torch.no_grad():
        logits = target(output).logits[0, -NEW_TOKENS - 1 : -1].double()
    chosen = logits.gather(1, output[0, -NEW_TOKENS:, None])[:, 0]
    assert output.shape == (1, 50 + NEW_TOKENS)
    assert ((logits.amax(1) - chosen) / logits.abs().amax(1) <= NEAR[dtype]).all()
