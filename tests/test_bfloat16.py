"""vllm 41758, transformers 39421, in bfloat16: the text changes only where two tokens were as good as equal.

Run in blocks, a target's logits differ from those of one token at a time by rounding. Two tokens whose logits are
closer than twice the largest such difference are a near-tie. The bundled pair, greedy, everything streamed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specstream
from specstream.models import tiny
from specstream.models.load import load_model

NEW_TOKENS = 48
PROMPTS = (
    "It was a truth",
    "[amber fox: 4815] The road went on. [amber fox:",
    "def main(arguments):\n    ",
    "She had been to the house of her aunt, who",
)


@cache
def pair() -> tuple[nn.Module, nn.Module, Any]:
    folder = Path(tiny.__file__).parent
    target, tokenizer, _ = load_model(folder / "target", torch.bfloat16, "cpu")
    draft, _, _ = load_model(folder / "draft", torch.bfloat16, "cpu")
    return target, draft, tokenizer


@cache
def alone(text: str) -> tuple[list[int], Tensor]:
    """The target's own tokens one at a time, and their logits float32 [tokens, vocab]."""
    target, _, tokenizer = pair()
    ids = torch.tensor([tokenizer(text).input_ids])
    generate: Any = target.generate
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits).float()


def largest_difference(text: str, rows: int) -> float:
    """Between the logits of one token at a time and those of blocks of `rows`, over the target's own text."""
    target, _, tokenizer = pair()
    tokens, logits = alone(text)
    whole = torch.tensor([tokenizer(text).input_ids + tokens])
    start = whole.shape[1] - len(tokens) - 1
    with torch.no_grad():
        out: Any = target(whole[:, :start], use_cache=True) if start else None
        cache, parts = out and out.past_key_values, []
        for first in range(start, whole.shape[1] - 1, rows):
            out = target(whole[:, first : min(first + rows, whole.shape[1] - 1)], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits[0].float())
    return float((torch.cat(parts) - logits).abs().max())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_texts_part_only_at_near_ties(depth: int) -> None:
    target, draft, tokenizer = pair()
    noise = max(largest_difference(text, depth + 1) for text in PROMPTS)
    parted = []
    options: dict[str, Any] = {"max_model_len": 160, "chunk_tokens": 16, "gpu_kv_budget": "min"}
    with specstream.compile(target, draft, num_speculative_tokens=depth, **options) as engine:
        for text in PROMPTS:
            ids = tokenizer(text).input_ids
            out: Any = engine.generate([ids], max_new_tokens=NEW_TOKENS, eos_token_id=[], do_sample=False)
            tokens, logits = alone(text)
            ours = out[0, len(ids) :].tolist()
            if ours != tokens:
                first = next(i for i, (a, b) in enumerate(zip(ours, tokens, strict=True)) if a != b)
                best = logits[first].topk(2).values
                parted.append(float(best[0] - best[1]))
    print(f"\nbfloat16, {depth} candidates: {len(parted)} of {len(PROMPTS)} texts part; {noise:.3f} apart in blocks")
    assert all(gap < 2 * noise for gap in parted), f"{parted}: no near-ties, {2 * noise} is one"
