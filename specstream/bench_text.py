"""Texts for what random tokens cannot show: prompts of a novel, and what a target alone makes of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specstream.cli import UsageError
from specstream.models.tiny import TEXT

NOVEL = TEXT / "persuasion.txt"
"""Which every checkout has."""


@dataclass(frozen=True)
class Alone:
    """A text of the target's own, one token at a time."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    """float32 [tokens, vocab]"""

    def gap(self, index: int) -> float:
        """By how much the best logit of a token exceeds the second."""
        best = self.logits[index].topk(2).values
        return float(best[0] - best[1])


def alone(target: nn.Module, prompt: list[int], new_tokens: int) -> Alone:
    """What transformers' own greedy `generate` makes of a prompt, whatever would end it."""
    generate: Any = target.generate
    ids = torch.tensor([prompt], device=next(target.parameters()).device)
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Alone(prompt, out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float())


def text_prompts(tokenizer: Any, file: Path, count: int, tokens: int) -> list[list[int]]:
    """Parts of a text as token ids [count][tokens], spread over it evenly; they overlap where it is too short for all.

    Raises:
        UsageError: it is too short for one.
    """
    text = file.read_text(encoding="utf-8")
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < tokens:
        raise UsageError(f"{file}: a text of {len(ids)} tokens is too short for a prompt of {tokens}")
    starts = [(len(ids) - tokens) * index // max(1, count - 1) for index in range(count)]
    return [ids[start : start + tokens] for start in starts]
