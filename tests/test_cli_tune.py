"""`specstream tune`: its table, its JSON, its trials for TensorBoard, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from torch import nn

from specstream import api, cli
from specstream.compiler import compile_model
from specstream.graph import PartitionedModel
from specstream.models.tiny import DRAFT, TARGET, TEXT
from specstream.trial import Stopwatch
from specstream.tuned_settings import TunedSettings

PAIR = ["tune", "--target", "tiny", "--draft", "tiny", "--context", "256", "--batch", "2", "--device", "cpu"]
FEW = [*PAIR, "--gpu-kv-budget", "600KiB", "--trials", "3", "--num-speculative-tokens", "auto"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("WARMUP", "BLOCKS", "ROUNDS"):
        monkeypatch.setattr(f"specstream.trial.{name}", 2)
    monkeypatch.setattr("specstream.tuning.give_memory_back", lambda: None)  # which takes longer than such a trial


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, int | None], PartitionedModel]:
    """What was captured of the preset, by role and length."""
    return {}


@pytest.fixture
def pair_captured_once(kept: dict[tuple[str, int | None], PartitionedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its random weights are always the same, and capturing takes longer than what is tried with it."""

    def of(model: nn.Module, name: str, max_model_len: int | None, role: str) -> PartitionedModel:
        known = role, max_model_len
        if known not in kept:
            kept[known] = compile_model(model, name, max_model_len, role)
        return kept[known]

    monkeypatch.setattr(api, "compile_model", of)


@pytest.mark.usefixtures("pair_captured_once")
def test_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(FEW) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tiny, draft tiny, 2 x 256 tokens, acceptance 0.8\n")
    for row in (" 1  ", " 2  ", "best  ", "than untuned  ", "kept in  "):
        assert f"\n{row}" in shown
    assert Path(shown.split("kept in")[1].split()[0]).is_file(), "in one line, where that is no terminal"
    assert "candidates" in shown


def test_texts_decide_on_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--draft-window", "auto", "--text", str(TEXT / "persuasion.txt"), "--json", str(tmp_path / "found.json")]
    pair = ["tune", "--target", str(TARGET), "--draft", str(DRAFT), "--context", "256", "--device", "cpu"]
    assert cli.main([*pair, "--trials", "4", "--gpu-kv-budget", "min", *text]) == 0
    figures = json.loads((tmp_path / "found.json").read_text())
    first, predicted_best, other_window, _ = figures["trials"]
    assert figures["workload"]["acceptance"] == first["acceptance"] > 0.3
    assert first["settings"]["draft_window"] is predicted_best["settings"]["draft_window"] is None
    assert other_window["settings"]["draft_window"] == 128, "the largest that leaves anything out"
    assert "a window of 128, acceptance 0." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"too short", " tokens is too short for a prompt of 256; give a longer one, or a smaller --context"),
        (b"caf\xe9 " * 1000, "is no text in UTF-8: invalid continuation byte at byte 3"),
        (None, "--text needs the target's tokenizer, and the folder "),
    ],
)
def test_texts_that_cannot_be_had(
    data: bytes | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, file = tmp_path / "target", tmp_path / "text"
    kept = () if data is not None else ("tokenizer*", "special*", "vocab*", "merges*")
    shutil.copytree(TARGET, target, ignore=shutil.ignore_patterns(*kept))
    file.write_bytes(b"a text" if data is None else data)
    arguments = ["tune", "--target", str(target), "--context", "256", "--device", "cpu", "--text", str(file)]
    assert cli.main(arguments) == cli.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("pair_captured_once")
def test_figures_and_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = FEW[: FEW.index("--num-speculative-tokens")]
    assert cli.main([*few, "--json", "-", "--trace", str(tmp_path / "log")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["workload"] == {"context": 256, "batch": 2, "acceptance": 0.8}
    assert 1 <= len(figures["trials"]) <= 3
    assert {trial["settings"]["num_speculative_tokens"] for trial in figures["trials"]} == {4}
    assert figures["best"] in [trial["settings"] for trial in figures["trials"]]
    assert Path(figures["file"]).exists()
    (folder,) = (tmp_path / "log").iterdir()
    assert len(list(folder.glob("trial-*/events*"))) == len(figures["trials"])


@pytest.mark.usefixtures("pair_captured_once")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--acceptance", "2"], "acceptance: got 2.0; allowed: a number from 0 to 1"),
        (["--chunk-tokens", "0"], "--chunk-tokens: got 0"),
        (["--gpu-kv-budget", "1KiB"], "--gpu-kv-budget is 1.00 KiB; the least that works"),
        (["--trace", "/dev/null/log"], "--trace /dev/null/log: it has to be a folder"),
        (["--context", "8"], "--context: got 8; allowed: at least 16"),
        (["--gpu-kv-budget", "min"], "--batch: got 2; allowed: at most 1"),
        (["--text", "/nowhere.txt"], "--text: /nowhere.txt is no file"),
        (["--text", "/"], "--text: / is a folder"),
        (["--text", __file__], "--text needs the target's tokenizer, and tiny is no folder"),
        (["--gpu-kv-budget", "min", "--host-kv-budget", "1KiB"], "a request of --context 256 tokens needs"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PAIR, *arguments]) == cli.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("pair_captured_once")
@pytest.mark.parametrize("trials", [0, 1])
def test_an_interrupt_ends_it_with_what_was_measured(
    trials: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rate, rates = Stopwatch.rate, list[float]()

    def interrupted(self: Stopwatch, settings: TunedSettings, best: float) -> float:
        if len(rates) == trials:
            raise KeyboardInterrupt
        rates.append(rate(self, settings, best))
        return rates[-1]

    monkeypatch.setattr(Stopwatch, "rate", interrupted)
    assert cli.main(FEW) == cli.INTERRUPTED
    shown = capsys.readouterr()
    assert shown.err.endswith("specstream: interrupted\n")
    for row in ("\n 1  ", "\nbest  ", "\nkept in  "):
        assert (row in shown.out) == (trials > 0)
