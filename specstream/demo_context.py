"""The context of the demo: the shipped text with facts far back, their questions, and the bundled pair."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specstream.errors import InvalidOption
from specstream.models.tiny import TARGET, TEXT
from specstream.models.tiny.facts import make_fact, make_question, random_facts

TITLE = "Persuasion by Jane Austen"
BUDGET_SHARE = 4
"""The context needs this many times the demo's KV budget."""
PLACES = (1 / BUDGET_SHARE, 0.65)
"""The part of the context that the facts stand in: behind all that could stay on the device, and far back."""
FEWEST_TOKENS_A_FACT = 64


@dataclass(frozen=True)
class Question:
    """A fact that the context states once; the context with the question for it at the end."""

    key: str
    value: str
    tokens_back: int
    """From the end of its statement to the end of the question."""
    prompt_ids: list[int]


def load_model(folder: Path) -> Any:
    """A model of the bundled pair, in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


def make_questions(tokenizer: Any, context: int, count: int, seed: int) -> list[Question]:
    """One context of at least `context` tokens with `count` facts, followed by each question in turn.

    Raises:
        InvalidOption: the shipped text is not that long, or the facts would crowd it.
    """
    if count * FEWEST_TOKENS_A_FACT > context:
        raise InvalidOption("facts", count, f"at most {context // FEWEST_TOKENS_A_FACT} in {context} tokens")
    words = re.findall(r"\S+\s*", (TEXT / "persuasion.txt").read_text(encoding="utf-8"))
    facts = random_facts(count, seed)
    statements = [f"\n{make_fact(key, value)}\n" for key, value in facts]
    chooser = random.Random(seed)
    first, last = PLACES
    shares = [first + (last - first) * (index + chooser.random()) / count for index in range(count)]

    def pieces(used: int) -> list[str]:
        """The text up to the end of each statement, and the rest, when `used` words are taken."""
        places = [0, *(int(share * used) for share in shares), used]
        spans = ["".join(words[start:stop]) for start, stop in pairwise(places)]
        return [span + statement for span, statement in zip(spans, [*statements, ""], strict=True)]

    def length(used: int) -> int:
        return len(_encode(tokenizer, "".join(pieces(used))))

    used = bisect_left(range(len(words)), context, key=length)
    if used == len(words):
        raise InvalidOption("context", context, f"at most {length(used - 1)} tokens: the shipped text is no longer")
    parts = pieces(used)
    questions = []
    for index, (key, value) in enumerate(facts):
        prompt_ids = _encode(tokenizer, "".join(parts) + f"\n{make_question(key)}")
        before = len(_encode(tokenizer, "".join(parts[: index + 1])))
        questions.append(Question(key, value, len(prompt_ids) - before, prompt_ids))
    return questions


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def kv_bytes_per_token(model: Any) -> int:
    """K and V of one token in all layers."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize)
