"""`specstream bench`: figures fit together, and mistakes are named."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from specstream import api, bench_generate, bench_round, cli
from specstream.bench_report import Progress
from specstream.bench_setup import BenchModels
from specstream.bench_steady import Round
from specstream.executor import CpuExecutor
from specstream.models.presets import dummy_model
from tests.helpers import captured


def given(*arguments: str) -> argparse.Namespace:
    return cli.make_parser().parse_args(["bench", *arguments])


def shared(context: int, *more: str) -> tuple[str, ...]:
    return ("--target", "tiny", "--dtype", "float32", "--context", str(context), "--chunk-tokens", "16", *more)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINK_COPY_BYTES", "DEVICE_COPY_BYTES"):
        monkeypatch.setattr(f"specstream.rates.{name}", {"cpu": 1 << 20})


_DUMMIES: dict[tuple[object, ...], Any] = {}


@pytest.fixture(autouse=True)
def capture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal dummy models are one, and captured once: that is what takes time."""

    def dummy(config: Any, *arguments: Any) -> Any:
        key = (config.to_json_string(), *arguments)
        if key not in _DUMMIES:
            _DUMMIES[key] = dummy_model(config, *arguments)
        return _DUMMIES[key]

    monkeypatch.setattr("specstream.bench_setup.dummy_model", dummy)
    monkeypatch.setattr("specstream.api.compile_model", lambda module, *_: captured(module))


def test_figures_of_rounds_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    asked = ("round", *shared(256, "--batch", "2", "--rounds", "5", "--queries", "3", "--json", str(file)))
    assert cli.main(["bench", *asked]) == 0
    shown = capsys.readouterr()
    assert "link utilization" in shown.out
    assert shown.err == ""
    figures = json.loads(file.read_text())
    assert [one["changed"] or one["planned"] for one in figures["rounds"]] == [False] * 5
    times = sorted(one["ms"] for one in figures["rounds"])
    assert [figures[name] for name in ("round_ms_min", "round_ms", "round_ms_max")] == [times[0], times[2], times[4]]
    assert figures["options"]["history"] == 251
    chunk_bytes = 3 * 2 * 2 * 16 * 8 * 4  # layers, K and V, KV heads, tokens, head_dim, bytes
    assert {one["streamed_bytes"] for one in figures["rounds"]} == {2 * 15 * chunk_bytes}
    streamed, link = figures["streamed_bytes_per_round"], figures["link_bytes_per_second"]
    assert figures["link_utilization"] == pytest.approx(streamed / (figures["round_ms"] / 1e3 * link))
    assert figures["device_kv_bytes"] == chunk_bytes * 2 * 3 + 4 * chunk_bytes // 3
    assert figures["target"] == {"name": "tiny", "parameters": 29_456, "rope": None}
    assert figures["profile"] == "cpu"
    assert figures["predicted_ms"]["round"] >= figures["predicted_ms"]["link"] > 0
    assert figures["launch_ms"] is figures["peak_device_bytes"] is figures["slowest_changed_over_median"] is None
    assert figures["versions"].keys() == {"specstream", "torch", "transformers"}


def test_all_resident_uses_no_link_and_launches_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuExecutor, "launch_seconds", 0.002, raising=False)
    asked = given("round", *shared(600, "--resident", "all", "--rounds", "2", "--queries", "1"))
    figures = bench_round.measure(asked, Progress(), BenchModels())
    assert figures["link_utilization"] is None
    assert (figures["streamed_bytes_per_round"], figures["launch_ms"]) == (0, 2)
    assert "YaRN" in figures["target"]["rope"]


def test_commits_change_the_chunk_list() -> None:
    asked = given("round", *shared(256, "--resident", "0.5", "--commit-every", "3", "--rounds", "6"))
    figures = bench_round.measure(asked, Progress(), BenchModels())
    assert figures["options"]["warmup"] == 7
    assert figures["options"]["history"] == 256 - 7 - 4 * 16
    # After a commit a round writes the chunk out, and from the next one on it streams.
    assert [one["changed"] for one in figures["rounds"]] == [True, False, True, True, False, True]
    grown = [one["streamed_bytes"] for one in figures["rounds"]]
    assert grown == [grown[0]] * 3 + [grown[0] + 3 * 2 * 2 * 16 * 8 * 4] * 3


def test_a_target_is_captured_once_for_benchmarks_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, lengths, models = api.captured_model, list[int](), BenchModels()

    def captured_model(role: str, model: Any, name: str, length: int, options: Any) -> Any:
        lengths.append(length)
        return capture(role, model, name, length, options)

    monkeypatch.setattr(api, "captured_model", captured_model)
    for context in (200, 128, 256, 600, 128):  # 600 is beyond what the model covers: another rotary embedding
        asked = given("round", *shared(context, "--rounds", "1", "--warmup", "1"))
        alone, together = (bench_round.measure(asked, Progress(), each) for each in (BenchModels(), models))
        assert alone["streamed_bytes_per_round"] == together["streamed_bytes_per_round"] > 0
        assert alone["target"] == together["target"]
    assert lengths == [200, 200, 128, 256, 256, 600, 600, 128, 128]


def test_what_a_change_costs_is_counted_by_the_byte() -> None:
    rounds = [Round(10.0, 100, False, False, None)] * 5 + [Round(22.0, 200, True, False, None)]
    assert bench_round.summarise(rounds, 1e9)["slowest_changed_over_median"] == pytest.approx(1.1)


@pytest.mark.parametrize("by_turns", [False, True])
def test_figures_of_decoding_fit_together(by_turns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ["--draft", "tiny", "--depth", "3", "--synthetic-acceptance-length", "2", "--draft-window", "32"]
    drafting += ["--drafting", "cohorts"] * by_turns
    asked = ("generate", *shared(160, "--batch", "2", "--new-tokens", "24", *drafting, "--json", "-"))
    assert cli.main(["bench", *asked]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["synthetic"]
    assert figures["prefill_seconds"] > 0
    assert figures["mean_acceptance_length"] == pytest.approx(2, abs=0.2)  # the last round is cut
    assert figures["draft"]["parameters"] == 29_456
    assert figures["tokens_per_second"] == pytest.approx(1e3 / figures["token_ms"])
    assert figures["decode_seconds"] == pytest.approx(figures["decode_rounds"] * figures["round_ms"] / 1e3)
    used = figures["streamed_bytes"] / (figures["decode_seconds"] * figures["link_bytes_per_second"])
    assert figures["link_utilization"] == pytest.approx(used)
    assert figures["draft_step_ms"] is None
    predicted = figures["predicted_ms"]
    assert predicted["round"] > predicted["target"] > 0
    assert 0 <= predicted["exposed draft"] <= predicted["draft"] * (1 + 1e-9)
    assert "for the profile cpu" in bench_generate.table_rows(figures)["predicted ms"]


def test_decoding_without_a_prefill_streams_the_whole_history() -> None:
    asked = given("generate", *shared(256, "--new-tokens", "9", "--skip-prefill", "--warmup", "2"))
    figures = bench_generate.measure(asked, Progress(), BenchModels())
    assert figures["prefill_seconds"] is None
    assert (figures["decode_rounds"], figures["decode_tokens"]) == (6, 6)  # the history has 1 of 9, the warm-up 2
    assert figures["mean_acceptance_length"] == 1
    assert figures["streamed_bytes"] == 6 * 15 * 3 * 2 * 2 * 16 * 8 * 4
    assert bench_generate.table_rows(figures)["prefill"] == "skipped"


def test_decoding_with_samples() -> None:
    asked = given("generate", *shared(128, "--new-tokens", "16", "--temperature", "0.8", "--top-p", "0.9"))
    figures = bench_generate.measure(asked, Progress(), BenchModels())
    assert (figures["options"]["temperature"], figures["options"]["top_p"]) == (0.8, 0.9)
    assert figures["decode_tokens"] == 12
    config = bench_generate.sampling(asked)
    assert config is not None
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.8, 0.9)
    assert bench_generate.sampling(given("generate", *shared(128))) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("round", "--target", "qwen4"), "qwen4: no such folder, and no preset; the presets are qwen3-8b, "),
        (("round", *shared(64), "--queries", "130"), "--queries 130: at most 129"),
        (("round", *shared(6)), "--context 6 leaves no history before 5 queries"),
        (("round", *shared(99), "--commit-every", "1"), "leaves no history before 5 queries and 23 commits of 16"),
        (("round", *shared(64), "--batch", "5000"), "--batch: got 5000; allowed: an integer from 1 to 4096"),
        (("round", *shared(64), "--memory-cap", "1GiB"), "--memory-cap: got '1GiB'; allowed: none on a CPU"),
        (("generate", *shared(256), "--memory-cap", "much"), "--memory-cap: got 'much'; allowed: a positive number"),
        (("round", *shared(64), "--device", "tpu"), "--device: got 'tpu'; allowed: auto or cpu"),
        (("generate", *shared(64)), "--context 64 leaves no prompt before --new-tokens 128"),
        (("generate", *shared(256), "--depth", "129"), "--depth: got 129; allowed: an integer from 1 to 128"),
        (("generate", *shared(256), "--new-tokens", "2", "--warmup", "9"), "--warmup 9 leaves none of the"),
        (("round", *shared(64), "--json", "no/such/figures.json"), "--json no/such/figures.json: it has to be a file"),
        (("generate", *shared(256), "--draft-window", "8"), "--draft-window: got 8; allowed: None with --draft none"),
        (("generate", *shared(256), "--draft", "none", "--drafting", "cohorts"), "--drafting: got 'cohorts'"),
        (
            ("generate", *shared(256), "--draft", "self", "--batch", "1", "--drafting", "cohorts"),
            '"auto", "sequential", "lookahead" or "off" with --batch 1',
        ),
        (("generate", *shared(256), "--resident", "1", "--gpu-kv-budget", "1MiB"), "give one of them"),
        (("generate", *shared(256), "--gpu-kv-budget", "1KiB"), "--gpu-kv-budget is 1.00 KiB; the least that works"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specstream: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize("resident", ["2", "-0.1", "half"])
def test_a_share_is_from_0_to_1(resident: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given("round", "--target", "tiny", f"--resident={resident}")
    assert "is no share: a number from 0 to 1, or all" in capsys.readouterr().err
