"""Options of `compile` that contradict each other are refused by name; what merely has nothing to do may stay."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import specstream
from specstream.errors import InvalidOption
from specstream.options import SELF_WINDOW, Options
from tests.helpers import best, model, prompt

Arguments = dict[str, Any]

WITHOUT_DRAFT: list[tuple[Arguments, str]] = [
    (
        {"draft_window": 8},
        "draft_window: got 8; allowed: None with draft=None. Give a draft, or leave it out.",
    ),
    (
        {"draft_sample_method": "greedy"},
        "draft_sample_method: got 'greedy'; allowed: \"probabilistic\" with draft=None. Give a draft, or leave it out.",
    ),
    (
        {"drafting": "sequential"},
        'drafting: got \'sequential\'; allowed: "auto" or "off" with draft=None. Give a draft, or leave it out.',
    ),
    (
        {"lookahead_branches": 8, "drafting": "off"},
        'lookahead_branches: got 8; allowed: "auto" with draft=None. Give a draft, or leave it out.',
    ),
    (
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.5},
        'rejection_sample_method: got \'synthetic\'; allowed: "standard" or "coupled" with draft=None. '
        "Give a draft, or leave it out.",
    ),
]
CONTRADICTIONS: list[tuple[Arguments, str]] = [
    (
        {"draft_sink": 8},
        "draft_sink: got 8; allowed: 4, the default, without draft_window. Set draft_window too, or leave it out.",
    ),
    (
        {"synthetic_acceptance_rate": 0.5},
        'synthetic_acceptance_rate: got 0.5; allowed: None without rejection_sample_method="synthetic".',
    ),
    (
        {"lookahead_branches": 8},
        'lookahead_branches: got 8; allowed: "auto" with drafting="auto". '
        'Leave it out, or set drafting="lookahead" for a draft.',
    ),
    (
        {"lookahead_branches": 0, "drafting": "lookahead"},
        'lookahead_branches: got 0; allowed: an integer from 1 to 1024 or "auto".',
    ),
    (
        {"rejection_sample_method": "synthetic"},
        "rejection_sample_method: got 'synthetic with neither'; allowed: synthetic with one of "
        "synthetic_acceptance_rate and synthetic_acceptance_length.",
    ),
    (
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1.5},
        "synthetic_acceptance_rate: got 1.5; allowed: a number from 0 to 1.",
    ),
]


@pytest.mark.parametrize(("options", "text"), WITHOUT_DRAFT + CONTRADICTIONS, ids=str)
def test_options_that_contradict_each_other(options: Arguments, text: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        specstream.compile(model("qwen3"), None, **options)
    assert str(refused.value) == text


@pytest.mark.parametrize("options", [options for options, _ in WITHOUT_DRAFT])
def test_with_a_draft_they_are_right(options: Arguments) -> None:
    """And drafting="off" turns off what is given, whatever its options are."""
    Options.from_keywords(**options)
    if "drafting" not in options:
        with specstream.compile(model("qwen3"), model("qwen3"), drafting="off", **options) as engine:
            assert engine._speculator.drafter is None


def test_off_makes_nothing_up() -> None:
    """Nothing is accepted then, so that no token is other than the target's, and nothing is to be warned of."""
    options: Arguments = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.5, "drafting": "off"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = specstream.compile(model("qwen3"), model("qwen3", seed=1), max_model_len=64, **options)
    with engine:
        out: Any = engine.generate([list(prompt(9))], max_new_tokens=3, return_dict_in_generate=True)
    assert out.requests[0].token_ids == best(prompt(9), 3)
    assert not out.requests[0].synthetic
    assert engine.options.drafting == "off"


def test_a_target_that_drafts_for_itself_has_a_window() -> None:
    with specstream.compile(model("qwen3"), "self", max_model_len=64, draft_sink=8) as engine:
        assert (engine.options.draft_window, engine.options.draft_sink) == (SELF_WINDOW, 8)


@pytest.mark.parametrize(("role", "models"), [("target", ("", None)), ("draft", (None, ""))])
def test_a_name_that_is_none_is_that_of_one_of_two_models(role: str, models: tuple[str | None, ...]) -> None:
    target, draft = (model("qwen3") if name is None else name for name in models)
    with pytest.raises(InvalidOption, match=rf"^{role}: got ''; allowed: a directory") as refused:
        specstream.compile(target, draft)
    assert ('"self" or None' in str(refused.value)) == (role == "draft")


def test_without_a_draft_the_most_candidates_and_coupled_sampling_may_stay() -> None:
    options: Arguments = {"num_speculative_tokens": 7, "rejection_sample_method": "coupled", "drafting": "off"}
    with specstream.compile(model("qwen3"), None, max_model_len=64, **options) as engine:
        out: Any = engine.generate([list(prompt(9))], max_new_tokens=3)
    assert out[0, 9:].tolist() == best(prompt(9), 3)


def test_dumps_of_two_models_of_one_name_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSTREAM_DUMP", str(tmp_path / "made" / "here"))
    target, draft = model("qwen3"), model("qwen3", layers=1)
    with specstream.compile(target, draft, max_model_len=64) as engine:
        engine.generate([list(prompt(9))], max_new_tokens=3)
    folders = sorted(path.name for path in (tmp_path / "made" / "here").iterdir())
    assert folders[:2] == ["draft_Qwen3ForCausalLM", "round_0000"]
    assert folders[-1] == "target_Qwen3ForCausalLM"
    attentions = [
        (tmp_path / "made" / "here" / name / "02_stream_attention.txt").read_text().count("stream_verify(")
        for name in (folders[0], folders[-1])
    ]
    assert attentions[1] == 3 * attentions[0]


def test_a_dump_that_cannot_be_written_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("SPECSTREAM_DUMP", str(file))
    with pytest.raises(InvalidOption) as refused:
        specstream.compile(model("qwen3"), None, max_model_len=64)
    assert str(refused.value) == (
        f"SPECSTREAM_DUMP: got {str(file)!r}; allowed: a directory that can be made and written (Not a directory). "
        "Name another one, or unset it."
    )
