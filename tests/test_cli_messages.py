"""The command line: messages in the words that are typed there, exit statuses, and forgiving what means the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specstream import cli, cli_generate
from specstream.errors import OutOfBudget
from tests.echo import GENERATE, Echo


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Echo:
    echo = Echo()
    monkeypatch.setattr(cli_generate, "_compile", lambda *_: echo)
    return echo


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu_kv_budget: got 'x'; allowed: less", "--gpu-kv-budget: got 'x'; allowed: less"),
        ("use gpu_kv_budget='min', or max_model_len=64.", "use --gpu-kv-budget min, or --max-model-len 64."),
        ("Use a draft of the same family, or draft=None.", "Use a draft of the same family, or --draft none."),
        ('None without rejection_sample_method="synthetic".', "None without --rejection-sample-method synthetic."),
        ("None without do_sample=True. Pass do_sample=True.", "None without --do-sample. Pass --do-sample."),
        ("a larger max_model_len. More: max_new_tokens", "a larger --max-model-len. More: --max-new-tokens"),
        ("draft: got 'small' for a draft", "--draft: got 'small' for a draft"),
        ("generation_config.top_p: got 2; allowed: 1", "generation_config.top_p: got 2; allowed: 1"),
        ('a.jsonl:2: "max_new_tokens" is True', 'a.jsonl:2: "max_new_tokens" is True'),
        ("/models/draft_window/a, draft_window.json: no", "/models/draft_window/a, draft_window.json: no"),
        ("prompt: got 101; allowed: 100", "prompt: got 101; allowed: 100"),
    ],
)
def test_messages_name_options_as_they_are_typed(text: str, shown: str) -> None:
    given = cli.make_parser().parse_args([*GENERATE, "--prompt", "a"])
    assert cli.as_flags(text, given) == shown


def test_memory_that_does_not_suffice_for_the_options_is_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OutOfBudget("gpu_kv_budget is 1 KiB")

    monkeypatch.setattr(cli_generate, "_compile", fail)
    assert cli.main([*GENERATE, "--prompt", "a", "--gpu-kv-budget", "1KiB"]) == 2
    assert capsys.readouterr().err == "specstream: error: --gpu-kv-budget is 1 KiB\n"
    assert cli.main([*GENERATE, "--prompt", "a"]) == 1


@pytest.mark.parametrize("command", [(), ("generate",), ("demo",), ("bench",), ("bench", "round")])
def test_help_tells_the_exit_status(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 if it was used wrongly, which includes options for which the memory does not suffice" in shown
    assert ('"max_new_tokens": N' in shown) == (command == ("generate",))


@pytest.mark.parametrize("none", ["none", "None", "NONE"])
def test_no_draft_however_it_is_written(none: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def spy(target: str, draft: str | None, *_: object) -> Echo:
        seen.append(draft)
        return Echo()

    monkeypatch.setattr(cli_generate, "_compile", spy)
    assert cli.main([*GENERATE, "--prompt", "a", "--draft", none]) == 0
    assert seen == [None]


@pytest.mark.parametrize("flag", ["--jsonl", "--prompt-file"])
def test_a_byte_order_mark_is_no_part_of_the_text(
    engine: Echo, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text('{"prompt": "abc"}\n' if flag == "--jsonl" else "abc\n", encoding="utf-8-sig")
    assert cli.main([*GENERATE, flag, str(file)]) == 0
    shown = capsys.readouterr().out
    assert (json.loads(shown)["text"] if flag == "--jsonl" else shown.strip()) == "ABC"


def test_options_that_are_numbers_with_a_point() -> None:
    given = cli.make_parser().parse_args(
        [*GENERATE, "--rejection-sample-method", "synthetic", "--synthetic-acceptance-rate", "0.5"]
    )
    assert cli.chosen_options(given)["synthetic_acceptance_rate"] == 0.5
