"""Benchmarks: a placed history is what a prefill leaves and is read, figures fit together, and mistakes are named."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specstream import bench_generate, bench_round, cli
from specstream.bench_history import place_history
from specstream.bench_report import Progress
from specstream.bench_steady import GreedyOnDevice, Round
from specstream.engine import Engine
from specstream.errors import InvalidOption, OutOfBudget
from specstream.executor import CpuExecutor
from specstream.kv import SequenceKV
from specstream.models.presets import PRESETS, dummy_model, preset_config
from specstream.models.rope import max_positions
from specstream.scheduler import RequestRows
from specstream.speculate import Candidates, Speculation, accept_greedy
from tests.helpers import captured, make_engine, model, prompt

# Presets


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("qwen3-8b", 8_190_735_360, 144 << 10),
        ("qwen3-1.7b", 1_720_574_976, 112 << 10),
        ("qwen3-0.6b", 596_049_920, 112 << 10),
        ("internlm2.5-7b", 7_737_708_544, 128 << 10),
        ("internlm2.5-1.8b", 1_889_110_016, 96 << 10),
        ("llama-3.1-8b", 8_030_261_248, 128 << 10),
        ("smollm2-135m", 134_515_008, 23_040),
    ],
)
def test_presets_have_the_published_sizes(name: str, parameters: int, kv_bytes: int) -> None:
    config, note = preset_config(name, 4096)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert (sum(parameter.numel() for parameter in module.parameters()), note) == (parameters, "")
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert each == kv_bytes


@pytest.mark.parametrize(
    ("name", "tokens", "factor"),
    [
        ("qwen3-8b", 40_960, None),
        ("qwen3-8b", 131_072, 4),
        ("qwen3-8b", 131_073, 5),
        ("internlm2.5-7b", 65_536, 2),
        ("llama-3.1-8b", 131_072, None),
        ("tiny", 513, 2),
    ],
)
def test_beyond_its_own_range_a_preset_has_yarn_and_says_so(name: str, tokens: int, factor: int | None) -> None:
    config, note = preset_config(name, tokens)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    reach = max_positions(module)
    assert reach is not None
    assert reach >= tokens
    assert (f"YaRN with factor {factor}" in note) if factor else note == ""
    assert (config.rope_parameters["rope_type"] == "yarn") == (factor is not None)


@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_dummy_model_differs_from_any_other_in_its_weights_alone(tokens: int) -> None:
    config, _ = preset_config("tiny", tokens)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dummy, again, other = (dummy_model(config, torch.bfloat16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    usual = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    buffers = dict(dummy.named_buffers())
    assert buffers.keys() == dict(usual.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in usual.named_buffers())
    for (name, ours), same, different in zip(
        dummy.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(ours, same)
        assert "norm" in name or not torch.equal(ours, different)
        assert torch.all(ours == 1) if "norm" in name else 0.015 < float(ours.detach().std()) < 0.025
    assert not dummy.training
    assert dummy(torch.arange(90)[None]).logits.isfinite().all()


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(InvalidOption, match="qwen3-8b or"):
        preset_config("qwen3-9b", 64)


# History

TOKENS = 4
"""Of a chunk."""
BUDGETS = {"none resident": "min", "some resident": "24KiB", "all resident": "1MiB"}


def engine_of(budget: str, **changes: Any) -> Engine:
    options: dict[str, Any] = {"chunk_tokens": TOKENS, "max_model_len": 64, "max_num_seqs": 1, "gpu_kv_budget": budget}
    return make_engine(model("qwen3"), **options | {"num_speculative_tokens": 3} | changes)


def kv_of(engine: Engine) -> SequenceKV:
    (sequence,) = engine._scheduler.running
    assert sequence.kv is not None
    return sequence.kv


def copy_history(source: Engine, destination: Engine) -> None:
    """Gives the one request of `destination` the tokens and the KV of that of `source`."""
    (ours,), (theirs,) = source._scheduler.running, destination._scheduler.running
    theirs.tokens = list(ours.tokens)
    kv = kv_of(source)
    destination._executor.store.blocks.copy_(source._executor.store.blocks)
    if kv.streamed:
        for layer in range(kv.layout.num_layers):
            span = layer, kv.resident, kv.resident + kv.streamed
            kv_of(destination).host_view(*span).copy_(kv.host_view(*span))


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("length", [3, 39, 40, 41])
def test_a_placed_request_is_as_a_prefill_leaves_it(budget: str, length: int) -> None:
    with engine_of(budget) as real, engine_of(budget) as placed:
        real.submit(prompt(length), max_new_tokens=12)
        while kv_of(real).length < length if real._scheduler.running else True:
            real.step()
        place_history(placed, length, max_new_tokens=12)
        for name in ("limit", "resident", "tail_slots", "blocks", "length", "streamed"):
            assert getattr(kv_of(placed), name) == getattr(kv_of(real), name), name
        copy_history(real, placed)
        outputs: list[list[int]] = []
        for engine in (real, placed):
            engine._executor.reset_counters()
            outputs.append([])
            while engine.has_unfinished:
                outputs[-1] += [token for step in engine.step() for token in step.new_token_ids]
        assert outputs[0] == outputs[1]
        assert len(outputs[0]) == 11
        assert real._executor.streamed_bytes == placed._executor.streamed_bytes


def logits_of(budget: str, change: str | None) -> Tensor:
    """The logits of a round after a placed history, one value of which was changed."""
    seen: list[Tensor] = []
    with engine_of(budget) as engine:
        place_history(engine, 41, max_new_tokens=12)
        kv, store = kv_of(engine), engine._executor.store
        open_block = kv.blocks[kv.resident + (41 // TOKENS - kv.resident) % kv.tail_slots]
        if change == "first on host":
            kv.host_view(0, kv.resident, kv.resident + 1)[0, 1, 0, 0, 0] += 1
        elif change == "last on host":
            kv.host_view(2, kv.resident, kv.resident + kv.streamed)[-1, 1, -1, -1, -1] += 1
        elif change == "resident":
            store.blocks[1, kv.blocks[0], 1, 0, 0, 0] += 1
        elif change == "tail":
            store.blocks[2, open_block, 1, 0, 0, 0] += 1
        elif change == "after the end":
            store.blocks[2, open_block, 1, 0, 2, 0] += 1
        engine._speculator.accept = lambda rows, logits: seen.append(logits.clone())  # type: ignore[method-assign]
        engine.step()
        streamed = kv.layout.num_layers * kv.streamed * kv.layout.block_bytes
        assert engine._executor.streamed_bytes == streamed
        assert (kv.resident + kv.streamed) * TOKENS == 40
        assert kv.resident > 0
        assert kv.streamed > 0
    return seen[0]


def test_a_decode_reads_all_of_a_placed_history_and_nothing_else() -> None:
    budget = BUDGETS["some resident"]
    plain = logits_of(budget, None)
    assert plain.isfinite().all()
    for change in ("first on host", "last on host", "resident", "tail"):
        assert not torch.equal(logits_of(budget, change), plain), change
    assert torch.equal(logits_of(budget, "after the end"), plain)


def test_a_history_that_finds_no_seat_is_refused_and_leaves_nothing() -> None:
    with engine_of("min") as engine:
        place_history(engine, 20, max_new_tokens=4)
        with pytest.raises(OutOfBudget, match="no seat"):
            place_history(engine, 20, max_new_tokens=4)
        assert len(engine._unfinished()) == 1


# The two benchmarks


def given(*arguments: str) -> argparse.Namespace:
    return cli._parser().parse_args(["bench", *arguments])


def shared(context: int, *more: str) -> tuple[str, ...]:
    return ("--target", "tiny", "--dtype", "float32", "--context", str(context), "--chunk-tokens", "16", *more)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINK_COPY_BYTES", "DEVICE_COPY_BYTES"):
        monkeypatch.setattr(f"specstream.bench_machine.{name}", {"cpu": 1 << 20})


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
    assert figures["options"]["history"] == 252
    chunk_bytes = 3 * 2 * 2 * 16 * 8 * 4  # layers, K and V, KV heads, tokens, head_dim, bytes
    assert {one["streamed_bytes"] for one in figures["rounds"]} == {2 * 15 * chunk_bytes}
    streamed, link = figures["streamed_bytes_per_round"], figures["link_bytes_per_second"]
    assert figures["link_utilization"] == pytest.approx(streamed / (figures["round_ms"] / 1e3 * link))
    assert figures["device_kv_bytes"] == chunk_bytes * 2 * 3 + 4 * chunk_bytes // 3
    assert figures["target"] == {"name": "tiny", "parameters": 29_456, "rope": None}
    assert figures["predicted_ms"]["round"] >= figures["predicted_ms"]["link"] > 0
    assert figures["launch_ms"] is figures["peak_device_bytes"] is figures["slowest_changed_over_median"] is None
    assert figures["versions"].keys() == {"specstream", "torch", "transformers"}


def test_all_resident_uses_no_link_and_launches_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuExecutor, "launch_seconds", 0.002, raising=False)
    asked = given("round", *shared(600, "--resident", "all", "--rounds", "2", "--queries", "1"))
    figures = bench_round.measure(asked, Progress())
    assert figures["link_utilization"] is None
    assert (figures["streamed_bytes_per_round"], figures["launch_ms"]) == (0, 2)
    assert "YaRN" in figures["target"]["rope"]


def test_commits_change_the_chunk_list() -> None:
    asked = given("round", *shared(256, "--resident", "0.5", "--commit-every", "3", "--rounds", "6"))
    figures = bench_round.measure(asked, Progress())
    assert figures["options"]["warmup"] == 7
    assert figures["options"]["history"] == 256 - 6 - 4 * 16
    # After a commit a round writes the chunk out, and from the next one on it streams.
    assert [one["changed"] for one in figures["rounds"]] == [True, False, True, True, False, True]
    grown = [one["streamed_bytes"] for one in figures["rounds"]]
    assert grown == [grown[0]] * 3 + [grown[0] + 3 * 2 * 2 * 16 * 8 * 4] * 3


def test_what_a_change_costs_is_counted_by_the_byte() -> None:
    rounds = [Round(10.0, 100, False, False, None)] * 5 + [Round(22.0, 200, True, False, None)]
    assert bench_round.summarise(rounds, 1e9)["slowest_changed_over_median"] == pytest.approx(1.1)


def test_acceptance_on_the_device_is_the_greedy_rule() -> None:
    logits = torch.randn(12, 5)
    best = logits.argmax(-1).tolist()
    proposed = [best[0:3], [best[4], (best[5] + 1) % 5, best[6]], [(best[8] + 1) % 5, *best[9:11]]]
    with engine_of("1MiB", max_num_seqs=3) as engine:
        rows = []
        for seat, candidates in enumerate(proposed):
            sequence = place_history(engine, 20, max_new_tokens=8, seed=seat)
            assert sequence.kv is not None
            rows.append(RequestRows(sequence, sequence.kv, [0, *candidates], False, Candidates(candidates), 4))
        GreedyOnDevice(Speculation("standard", "greedy"), None).accept(rows, logits)
    for seat, row in enumerate(rows):
        assert (row.accepted, row.produced) == accept_greedy(logits[4 * seat : 4 * seat + 4], proposed[seat])
    assert [row.accepted for row in rows] == [3, 1, 0]


def test_figures_of_decoding_fit_together(capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ("--draft", "tiny", "--depth", "3", "--synthetic-acceptance-length", "2", "--draft-window", "32")
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


def test_decoding_without_a_prefill_streams_the_whole_history() -> None:
    asked = given("generate", *shared(256, "--new-tokens", "9", "--skip-prefill", "--warmup", "2"))
    figures = bench_generate.measure(asked, Progress())
    assert figures["prefill_seconds"] is None
    assert (figures["decode_rounds"], figures["decode_tokens"]) == (6, 6)  # the history has 1 of 9, the warm-up 2
    assert figures["mean_acceptance_length"] == 1
    assert figures["streamed_bytes"] == 6 * 15 * 3 * 2 * 2 * 16 * 8 * 4
    assert bench_generate._rows(figures)["prefill"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("round", "--target", "qwen4"), "qwen4: no such folder, and no preset; the presets are qwen3-8b, "),
        (("round", *shared(64), "--queries", "130"), "--queries 130: at most 129"),
        (("round", *shared(6)), "--context 6 leaves no history before 5 queries"),
        (("round", *shared(99), "--commit-every", "1"), "leaves no history before 5 queries and 23 commits of 16"),
        (("round", *shared(64), "--batch", "5000"), "--batch: got 5000; allowed: an integer from 1 to 4096"),
        (("round", *shared(64), "--device", "tpu"), "--device: got 'tpu'; allowed: auto or cpu"),
        (("generate", *shared(64)), "--context 64 leaves no prompt before --new-tokens 128"),
        (("generate", *shared(256), "--depth", "129"), "--depth: got 129; allowed: an integer from 1 to 128"),
        (("generate", *shared(256), "--new-tokens", "2", "--warmup", "9"), "--warmup 9 leaves none of the"),
        (("generate", *shared(256), "--draft-window", "8"), "--draft-window: got 8; allowed: None with --draft none"),
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


# The table


@pytest.fixture(scope="module")
def gpu_table(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_table", root / "benchmarks" / "gpu_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["gpu_table"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_of_the_table_is_a_command(gpu_table: ModuleType) -> None:
    for row in gpu_table.ROWS.values():
        asked = given(*row.command.split())
        assert asked.target in PRESETS
        assert preset_config(asked.target, asked.context)


def test_the_table_keeps_what_was_measured(
    gpu_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ran = tmp_path / "results" / "gpu.json", list[str]()

    def measure(command: str) -> dict[str, Any]:
        ran.append(command)
        return {"link_utilization": 0.985, "launch_ms": 2.0, "round_ms": 5.0} if len(ran) != 2 else {"error": "odd"}

    def table(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpu_table.py", "--file", str(file), *arguments])
        gpu_table.main()
        return capsys.readouterr().out.partition("| row |")[2]

    monkeypatch.setattr(gpu_table, "measure", measure)
    shown = table("--rows", "a-1x32K,a-8x16K,e")
    assert len(ran) == 2  # e has the run of a-1x32K
    assert "| a-1x32K | link_utilization | 0.985 | >= 0.98 | yes |" in shown
    assert "| a-8x16K | link_utilization | failed: odd | >= 0.99 |  |" in shown
    assert "| e-1x32K | launch_ms | 2 | <= 1 | no |" in shown
    assert "| a-8x16K | link_utilization | 0.985 | >= 0.99 | no |" in table("--rows", "a-8x16K,a-1x32K")
    assert len(ran) == 3  # what failed, and nothing else, was run again
    assert "| g-1x1K | round_ms | not run | no baseline yet |  |" in table("--rows", "g", "--limit-seconds", "-1")
    table("--rows", "g")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"baselines": {"g-1x1K": 6.0}}))
    assert "| g-1x1K | round_ms | 5 | <= 6 | yes |" in table("--rows", "g")
    assert len(ran) == 4
    table("--rows", "g", "--redo")
    assert len(ran) == 5
    with pytest.raises(SystemExit, match="no row 'z'"):
        table("--rows", "a,z")
