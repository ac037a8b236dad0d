"""Warnings name the caller's own line."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import specstream
from specstream import cli
from specstream.caller import warn_caller
from specstream.errors import SpecStreamWarning
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


def test_transformers_is_nobodys_own_code() -> None:
    """Its `generate` calls the engine for whoever called that."""
    target, draft = model("qwen3"), build("qwen3", vocab_size=50, seed=1)
    suppressed: dict[str, Any] = {"suppress_tokens": list(range(50)), "max_new_tokens": MOST_USELESS_ROUNDS + 6}
    generate: Any = target.generate
    with (
        specstream.compile(target, draft, max_model_len=96) as engine,
        pytest.warns(SpecStreamWarning, match="is off") as seen,
    ):
        generate(torch.tensor([prompt(9)]), custom_generate=engine.custom_generate, **suppressed)
    ours = [warning for warning in seen if warning.category is SpecStreamWarning]
    assert [Path(warning.filename).name for warning in ours] == [Path(__file__).name]


def test_a_command_shows_a_warning_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with cli.plain_warnings():
        warn_caller("speculation is off")
        with pytest.warns(RuntimeWarning):
            warnings.warn("of somebody else", RuntimeWarning, stacklevel=1)
    assert capsys.readouterr().err == "specstream: warning: speculation is off\n"
