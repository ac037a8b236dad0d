"""vllm 41758, transformers 39421, in bfloat16: the text changes only where two tokens were as good as equal.

What is compared, and what a near-tie is, `benchmarks/bfloat16_divergence.py` says; here on a CPU.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specstream.models import tiny
from tests.helpers import script

NEW_TOKENS = 48
divergence = script("bfloat16_divergence")


@cache
def pair() -> Any:
    folder = Path(tiny.__file__).parent
    return divergence.Pair.load(folder / "target", folder / "draft", torch.device("cpu"))


@cache
def texts() -> Any:
    return pair().texts(NEW_TOKENS)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_texts_part_only_at_near_ties(depth: int) -> None:
    figures = divergence.measure(pair(), depth, texts())
    print(f"\nbfloat16, {depth} candidates: {figures}")
    assert figures["tokens"] == len(texts()) * NEW_TOKENS
    assert figures["beyond_near_ties"] == 0, figures
