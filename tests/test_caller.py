"""Warnings name the caller's own line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specstream
from specstream.speculator import MOST_USELESS_ROUNDS
from tests.architectures import build
from tests.helpers import make_engine, model, prompt


def test_a_warning_while_tokens_are_made_names_the_line_that_asked_for_them() -> None:
    draft = build("qwen3", vocab_size=50, seed=1)
    suppressed: dict[str, Any] = {"suppress_tokens": list(range(50)), "max_new_tokens": MOST_USELESS_ROUNDS + 6}
    with (
        make_engine(model("qwen3"), draft, max_model_len=96) as engine,
        pytest.warns(UserWarning, match="is off") as seen,
    ):
        engine.generate([list(prompt(9))], **suppressed)
    assert [Path(warning.filename).name for warning in seen] == [Path(__file__).name]


def test_a_warning_while_an_engine_is_made_names_the_line_that_makes_it() -> None:
    options: dict[str, Any] = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.5}
    with pytest.warns(UserWarning, match="made up") as seen:
        specstream.compile(model("qwen3"), model("qwen3", seed=1), max_model_len=64, **options).close()
    assert [Path(warning.filename).name for warning in seen] == [Path(__file__).name]
