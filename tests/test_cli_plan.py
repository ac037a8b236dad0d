"""`specstream plan`: its table, its JSON, its trace, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from specstream import cli
from specstream.models.tiny import DRAFT, TARGET
from specstream.traces.plugin import answers
from specstream.traces.run_reader import RunReader

PAIR = ["plan", "--target", str(TARGET), "--draft", str(DRAFT), "--context", "4096"]
STREAMS = [*PAIR, "--gpu-kv-budget", "4MiB"]


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*STREAMS, "--max-batch", "--max-context", "--min-gpu", "--acceptance", "0.5:0.9"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("target with draft draft, 1 x 4096 tokens, on h200\n")
    for row in (
        "fits",
        "device memory",
        "  weights",
        "  ring",
        "  tails",
        "host memory",
        "a round",
        "drafting",
        "link",
    ):
        assert f"\n{row} " in shown
    for row in ("longest context", "most requests", "smallest listed device"):
        assert f"\n{row} " in shown
    assert "at acceptance 0.5 to 0.9" in shown


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert cli.main([*STREAMS, "--json", "-", "--max-batch"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is True
    for name in ("round_ms", "link_floor_ms", "link_utilization", "exposed_draft_ms", "hidden_draft_ms"):
        assert figures[name] >= 0
    assert figures["tokens_per_second"] > 0
    assert figures["bound_by"] in ("link", "device memory", "compute", "host")
    assert figures["max_batch"] > 1
    assert "max_context" not in figures
    memory = figures["memory"]
    of_target, of_draft = ("weights", "ring", "tails", "resident"), ("draft_weights", "draft_kv", "drawn_from")
    classes = (*of_target, *of_draft, "prompt_buffer", "workspace")
    assert sum(memory[name] for name in classes) == memory["device"]
    assert memory["workspace"] > 0
    assert memory["ring"] + memory["tails"] + memory["resident"] <= 4 << 20
    assert memory["host"] > 0
    assert cli.main([*STREAMS, "--json", str(file), "--max-batch"]) == 0
    assert json.loads(file.read_text()) == figures


def test_what_does_not_fit_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PAIR, "--fit-gpu", "21MiB"]) == 0
    shown = capsys.readouterr().out
    assert "no: " in shown
    assert "\nadvice" in shown
    assert cli.main([*PAIR, "--fit-gpu", "21MiB", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is False
    assert figures["round_ms"] is None
    assert figures["advice"]


def test_which_memory_is_short_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PAIR, "--gpu-kv-budget", "100KiB", "--host-kv-budget", "1MiB"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"short of [\d.]+ .iB of device memory, by --gpu-kv-budget and [\d.]+ .iB of host memory", shown)


def test_options_are_named_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PAIR, "--gpu-kv-budget", "1KiB"]) == 0
    shown = capsys.readouterr().out
    assert "--gpu-kv-budget is 1.00 KiB" in shown
    assert "gpu_kv_budget" not in shown


def test_a_planned_run_that_tensorboard_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*STREAMS, "--trace", str(tmp_path)]) == 0
    assert f"tensorboard --logdir {tmp_path}" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    reader = RunReader(folder)
    assert reader.info.kind == "plan"
    assert reader.info.memory["ring"] > 0
    assert reader.num_plans == 1
    answer = answers.plan(reader, 0)
    assert answer["figures"]["duration_us"] == reader.plan(0).period_us
    assert cli.main([*PAIR, "--fit-gpu", "21MiB", "--trace", str(tmp_path / "none")]) == 0
    assert "no round to show" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "--device: got 'tpu'; allowed: h200, h100"),
        (["--context", "99999"], "--context: got 99999; allowed: at most 32768"),
        (["--fit-gpu", "big"], "--fit-gpu: got 'big'"),
        (["--target", "nowhere"], "--target: got 'nowhere'; allowed: qwen3-8b"),
        (["--draft", "nowhere"], "--draft: got 'nowhere'; allowed: qwen3-8b"),
        (["--draft", "none", "--draft-window", "8"], "--draft-window: got 8"),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file: it has to be a file"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PAIR, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"specstream: error: {said}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--acceptance", "2"], ["--acceptance", "0.9:0.1"], ["--max-model-len", "9"], ["--batch", "0"]]
)
def test_what_cannot_be_parsed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*PAIR, *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
def test_figures_that_cannot_be_written_are_refused_before_they_are_computed(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    if there:
        file.touch()
    locked = file if there else tmp_path
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != locked)
    assert cli.main([*STREAMS, "--json", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "it has to be a file in a folder that can be written to, or - for stdout" in shown.err


@pytest.mark.parametrize("name", ["no/round.png", "round.jpg", "round", ".", "", "file/round.png", "folder.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    file = str(tmp_path / name) if name else ""
    assert cli.main([*STREAMS, "--png", file]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"specstream: error: --png {file}: it has to be a file that ends in .png")


def test_without_matplotlib_no_picture_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cli.main([*STREAMS, "--png", str(tmp_path / "round.png")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert 'pip install "specstream[tensorboard]"' in shown.err


def test_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra tensorboard, is not installed")
    file = tmp_path / "round.png"
    assert cli.main([*STREAMS, "--png", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert cli.main([*PAIR, "--fit-gpu", "21MiB", "--png", str(tmp_path / "none.png")]) == 0
    assert "no round to show" in capsys.readouterr().err
    assert not (tmp_path / "none.png").exists()
