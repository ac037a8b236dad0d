"""draft="self": the target proposes for itself, with a window of its latest tokens and no further weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import specstream
from specstream import cli, cli_generate
from specstream.engine import Engine
from specstream.errors import InvalidOption
from specstream.models import tiny
from specstream.models.load import load_model
from specstream.options import SELF_WINDOW
from tests.helpers import model, prompt, reference

OPTIONS: dict[str, Any] = {"chunk_tokens": 4, "max_model_len": 96, "gpu_kv_budget": "min"}
BUNDLED = Path(tiny.__file__).parent / "target"


def compiled(target: Any, **options: Any) -> Engine:
    return specstream.compile(target, "self", **OPTIONS | options)


@pytest.mark.parametrize("drafting", ["sequential", "cohorts"])
@pytest.mark.parametrize("window", [None, 8])
def test_the_tokens_are_the_targets(window: int | None, drafting: str) -> None:
    options = {} if window is None else {"draft_window": window, "draft_sink": 2}
    prompts = [prompt(40), prompt(23, 1), prompt(60, 2)]
    with compiled(model("qwen3"), drafting=drafting, **options) as engine:
        out: Any = engine.generate([list(ids) for ids in prompts], max_new_tokens=24, return_dict_in_generate=True)
        metrics = engine.metrics()
    for ids, request in zip(prompts, out.requests, strict=True):
        assert request.token_ids == reference(model("qwen3"), ids, 24).tokens
    if window is None:  # a window that holds everything
        assert metrics.draft_acceptance_rate == 1
    else:
        assert 0 < metrics.draft_acceptance_rate < 1


def test_it_has_no_weights_of_its_own_and_a_window_by_default() -> None:
    with compiled(model("qwen3")) as engine:
        assert engine.memory.draft_weights == 0
        assert engine._speculator.drafter is not None
        assert engine._speculator.drafter.window.window == SELF_WINDOW
        assert engine._speculator.drafter.model is engine._planner.model
        assert engine._planner.draft.read_bytes > 0, "a step reads the weights nevertheless"
    with compiled(model("qwen3"), drafting="off") as engine:
        assert engine._speculator.drafter is None


@pytest.mark.parametrize("word", ["Self", "none"])
def test_a_word_that_is_nearly_right_is_refused_at_once(word: str) -> None:
    with pytest.raises(InvalidOption, match=f"draft: got '{word}'; allowed: .*\"self\" or None"):
        specstream.compile(model("qwen3"), word)


def test_a_folder_of_that_name_is_given_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli_generate._draft("self") == "self"
    assert cli_generate._draft("./self") == cli_generate._model("self") == str(tmp_path / "self")


def test_on_real_text_most_of_its_candidates_are_accepted() -> None:
    """The bundled target, which was trained: a window of 256 tokens of a thousand of the bundled novel."""
    target, _, _ = load_model(BUNDLED, torch.float32, "cpu")
    text = " ".join((tiny.TEXT / "persuasion.txt").read_text(encoding="utf-8")[:40_000].split())
    ids: list[int] = AutoTokenizer.from_pretrained(BUNDLED)(text)["input_ids"]
    prompts = [ids[start : start + 1000] for start in (0, 1500, 3000)]
    options: dict[str, Any] = {"max_model_len": 1100, "gpu_kv_budget": "min", "draft_window": 256}
    with specstream.compile(target, "self", **options) as engine:
        ours: Any = engine.generate(prompts, max_new_tokens=64, eos_token_id=[])
        rate = engine.metrics().draft_acceptance_rate
    with specstream.compile(target, None, max_model_len=1100) as engine:
        theirs: Any = engine.generate(prompts, max_new_tokens=64, eos_token_id=[])
    assert ours.tolist() == theirs.tolist()
    assert rate > 0.8


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-model-len", "256", "--draft-window", "64", "--max-new-tokens", "8", "--json"]
    asked = ["generate", "--target", str(BUNDLED), "--draft", "self", "--prompt", "The link", *options]
    assert cli.main(asked) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["engine_metrics"]["num_draft_tokens"] > 0
    shape = ["--target", "tiny", "--dtype", "float32", "--device", "cpu", "--context", "128", "--chunk-tokens", "16"]
    assert (
        cli.main(["bench", "generate", *shape, "--draft", "self", "--new-tokens", "16", "--warmup", "0", "--json", "-"])
        == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert figures["draft"]["name"] == "self"
    assert figures["mean_acceptance_length"] > 2
