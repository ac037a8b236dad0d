"""--trace: refused before anything runs, or the rounds are there and the command says how to look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import specstream
from specstream import cli, cli_generate, demo
from specstream.errors import InvalidOption
from specstream.traces.validate import validate
from tests.echo import GENERATE, Echo
from tests.test_bench import capture_once, shared, small_copies
from tests.test_demo import Bytes, Reader
from tests.trace_cases import on_disk

__all__ = ["capture_once", "small_copies"]  # fixtures


class TracedEcho(Echo):
    """An engine that can only be asked to trace."""

    traced = "never"

    @contextmanager
    def trace(self: Any, logdir: str) -> Iterator[Path]:
        assert not self.closed
        self.traced = f"into {logdir}"
        yield Path(logdir) / "a run"
        self.traced += ", ended" if not self.closed else ", too late"


class TracedReader(Reader):
    trace = TracedEcho.trace
    traced, closed = "never", False


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = TracedEcho()
    monkeypatch.setattr(cli_generate, "_compile", lambda *_: engine)
    assert cli.main([*GENERATE, "--prompt", "text", "--trace", "my runs"]) == 0
    assert engine.traced == "into my runs, ended"
    shown = capsys.readouterr()
    assert shown.out == "TEXT\n"
    assert "rounds are in my runs/a run; to look at them: tensorboard --logdir 'my runs'\n" in shown.err


def test_without_it_nothing_is_traced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = TracedEcho()
    monkeypatch.setattr(cli_generate, "_compile", lambda *_: engine)
    assert cli.main([*GENERATE, "--prompt", "text"]) == 0
    assert engine.traced == "never"
    assert "tensorboard" not in capsys.readouterr().err


def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = TracedReader()
    monkeypatch.setattr(demo, "load_model", lambda _: Reader())
    monkeypatch.setattr(demo, "load_tokenizer", Bytes)
    monkeypatch.setattr(specstream, "compile", lambda *_, **__: engine, raising=False)
    assert cli.main(["demo", "--facts", "1", "--trace", "runs"]) == 0
    assert engine.traced == "into runs, ended"
    assert "tensorboard --logdir runs\n" in capsys.readouterr().err


def test_bench_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = shared(
        128,
        "--batch",
        "2",
        "--new-tokens",
        "8",
        "--draft",
        "self",
        "--warmup",
        "0",
        "--trace",
        str(tmp_path / "new" / "runs"),
    )
    assert cli.main(["bench", "generate", *asked]) == 0
    (run,) = (tmp_path / "new" / "runs").iterdir()
    found = on_disk(run)
    assert found.info.draft == "self"
    assert sum(each.produced for each in found.summaries) == 16
    assert all(each.spans for each in found.rounds.values())
    assert [validate(trace) for trace in found.traces] == [[]]
    assert f"rounds are in {run}; to look at them: tensorboard --logdir {run.parent}\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", [GENERATE, ("demo",), ("bench", "generate", *shared(128))])
def test_a_folder_that_cannot_be_is_refused_first(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = [*command, "--prompt", "a"] if command is GENERATE else list(command)
    monkeypatch.setattr(cli_generate, "_compile", lambda *_: pytest.fail("a model was loaded"))
    for folder in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), ""):
        assert cli.main([*arguments, "--trace", folder]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert (
            shown.err == f"specstream: error: --trace {folder}: it has to be a folder that can be made or written to\n"
        )


def test_what_the_engine_refuses_is_said_of_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(TracedEcho):
        def trace(self, logdir: str) -> Any:
            raise InvalidOption("logdir", logdir, "a folder that can be written to", "runs/1: No space left.")

    monkeypatch.setattr(cli_generate, "_compile", lambda *_: Refusing())
    assert cli.main([*GENERATE, "--prompt", "a", "--trace", "runs"]) == 2
    assert capsys.readouterr().err.startswith("specstream: error: --trace: got 'runs'; allowed: a folder")


def test_after_an_interrupt_it_still_says_where_the_rounds_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(TracedEcho):
        @contextmanager
        def trace(self, logdir: str) -> Iterator[Path]:
            try:
                yield Path(logdir)
            finally:
                self.traced = "ended"

        def step(self) -> Any:
            raise KeyboardInterrupt

    engine = Interrupted()
    monkeypatch.setattr(cli_generate, "_compile", lambda *_: engine)
    assert cli.main([*GENERATE, "--prompt", "a", "--trace", "runs"]) == cli.INTERRUPTED
    assert engine.traced == "ended"
    assert "tensorboard --logdir runs" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("generate",), ("demo",), ("bench", "generate")])
def test_help_has_the_line_to_run(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--trace DIR record plans and rounds there" in text
    assert "tensorboard --logdir DIR" in text
