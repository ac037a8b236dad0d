"""Misspelt words: what was meant is asked, and a misspelt name of a model is not looked up on the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import specstream
from specstream import api, cli
from specstream.closest import closest, did_you_mean
from specstream.errors import InvalidOption
from specstream.fit import plan
from specstream.models.presets import PRESETS, preset_config
from specstream.models.tiny import DRAFT, TARGET
from specstream.options import Options


@pytest.mark.parametrize(
    ("given", "word"),
    [("slef", "self"), ("qwen3-8", "qwen3-8b"), ("Qwen3-8B", "qwen3-8b"), ("gpt2", None), ("", None), (5, None)],
)
def test_the_closest_word(given: object, word: str | None) -> None:
    assert closest(given, [*PRESETS, "self"]) == word
    assert did_you_mean(given, [*PRESETS, "self"]) == (f"Did you mean {word!r}?" if word else "")


@pytest.mark.parametrize(
    ("ask", "word"),
    [
        (lambda: plan("qwen3-8", None, context=64), "qwen3-8b"),
        (lambda: plan("tiny", "slef", context=64), "self"),
        (lambda: plan("tiny", None, context=64, device="rtx4090"), "rtx-4090"),
        (lambda: plan("tiny", None, context=64, chunk_token=8), "chunk_tokens"),
        (lambda: Options(drafting="sequentail"), "sequential"),  # type: ignore[arg-type]
        (lambda: Options(rejection_sample_method="coupld"), "coupled"),  # type: ignore[arg-type]
        (lambda: preset_config("smollm-135m", 64), "smollm2-135m"),
    ],
)
def test_what_was_meant_is_asked(ask: Callable[[], Any], word: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        ask()
    assert refused.value.way_out.startswith(f"Did you mean {word!r}?")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(source: object, *_: object) -> NoReturn:
        raise InvalidOption("model", source, "asked of the hub")

    monkeypatch.setattr(api, "load_model", look_up)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3-8", "Did you mean 'qwen3-8b'? 'qwen3-8b' is a preset, for plan and bench: an engine needs weights."),
        ("qwen3-8b", "'qwen3-8b' is a preset, for plan and bench"),
        ("gpt2", "asked of the hub"),
        ("Qwen/Qwen3-8B", "asked of the hub"),
        ("slef", "asked of the hub"),  # a target is never "self"
    ],
)
def test_a_name_like_a_preset_is_not_asked_of_the_hub(name: str, said: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        specstream.compile(name, device="cpu")
    assert said in str(refused.value)
    assert ("Did you mean" in str(refused.value)) == (name == "qwen3-8")


def test_a_draft_like_self_is_not_asked_of_the_hub() -> None:
    with pytest.raises(InvalidOption, match=r"draft: got 'slef'; allowed: .* Did you mean 'self'"):
        specstream.compile(TARGET, "slef", device="cpu")


@pytest.mark.usefixtures("no_hub")
def test_a_folder_of_such_a_name_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3-8").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match="asked of the hub"):
        specstream.compile("qwen3-8", device="cpu")


def test_a_benchmark_asks_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "round", "--target", "qwen-8b"]) == 2
    assert capsys.readouterr().err.endswith("tiny. Did you mean 'qwen3-8b'?\n")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["bench", "round", "--target", "tiny", "--drafting", "x"], "specstream bench round"),
        (["bench", "--odd", "round", "--target", "tiny"], "specstream bench"),
        (["plan", "--target", str(TARGET), "--draft", str(DRAFT), "--context", "64", "--odd"], "specstream plan"),
        (["--odd", "demo"], "specstream"),
    ],
)
def test_a_flag_that_a_command_has_not_shows_its_own_usage(
    arguments: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: {command} [-h]")
    assert f"{command}: error: unrecognized arguments: --" in shown
