"""What streaming is compared with computes what the model does, and the scripts that compare run, here on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specstream.bench_resident import ResidentModel
from specstream.bench_setup import BenchModel
from specstream.speculator import MOST_USELESS_ROUNDS
from tests.helpers import captured, figures_of, model, prompt, script


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINK_COPY_BYTES", "DEVICE_COPY_BYTES"):
        monkeypatch.setattr(f"specstream.rates.{name}", {"cpu": 1 << 20})


@torch.inference_mode()
def test_a_resident_model_computes_what_the_model_does() -> None:
    target, ids = model("qwen3"), torch.tensor([prompt(40)])
    expected: Any = target(ids)
    resident = ResidentModel(captured(target), 40)
    for start, stop in ((0, 17), (17, 38), (38, 40)):
        logits = resident.run(ids[:, start:stop], start, torch.arange(stop - start))
        torch.testing.assert_close(logits, expected.logits[:, start:stop])
    assert resident.run(ids[:, 38:], 38, torch.arange(0)).shape[1] == 0


def test_the_scripts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[str, Any] = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    tiny = "--target", "tiny", "--context", "128"
    round_of_one = figures_of("resident_baseline", *tiny, **places)
    assert round_of_one["over_graph"] == pytest.approx(round_of_one["round_ms"] / round_of_one["baseline_graph_ms"])
    prefill = figures_of("prefill_baseline", *tiny, "--piece", "64", **places)
    assert prefill["over_resident"] == pytest.approx(prefill["streamed_seconds"] / prefill["resident_seconds"])
    cohorts = figures_of(
        "cohorts", "--target", "tiny", "--draft", "self", "--context", "512", "--rounds", "2", **places
    )
    assert cohorts["exposed"] == pytest.approx(max(0, 1 - 1 / cohorts["on_over_off"]))
    few = "--target", "tiny", "--rounds", "2"
    drafted = "--draft", "self", "--context", "512", "--depth", "2"
    alone = figures_of("one_request", *few, *drafted, "--hit-rounds", "6", **places)
    (ways,) = alone["depths"].values()
    exposed = ways["lookahead"]["exposed_ms"] / ways["short"]["exposed_ms"]
    assert alone["lookahead_over_short"] == pytest.approx(exposed)
    foreseen, outcomes = (ways["lookahead"][name] for name in ("foreseen", "outcomes"))
    assert outcomes == 6 - 1, "the first round has no candidates"
    assert alone["hit_rate_error"] == pytest.approx(abs(foreseen / outcomes - alone["expected_hit_rates"]["2"]))
    priority = figures_of("draft_priority", *few, *drafted, "--batch", "2", **places)
    assert priority["ways"]["as it is"]["2"]["round_ms"] > 0
    assert list(priority["ways"]["32 processors"]["2"]) == ["error"], "there is no driver; the other ways are measured"
    traced = figures_of("trace_overhead", *few, "--draft", "self", "--context", "512", "--kept", "2", **places)
    assert traced["overhead"] > -1
    assert traced["run_bytes"] > 0
    every = "--target", "tiny", "--draft", "tiny", "--small", "tiny"
    peaks = figures_of("peak_memory", *every, "--context", "1024", "--new-tokens", "6", **places)
    assert [one["batch"] for one in peaks["configurations"]] == [1, 2, 8, 1, 4, 1]
    assert peaks["worst_error"] is None, "nothing is measured on a CPU"
    ranks = figures_of("recovery_ranks", "--context", "128", "--prompts", "2", **places)
    assert 0.3 < ranks["agreement"] < 1
    assert 0.1 < sum(ranks["rank_shares"]) <= 1
    itself = figures_of("recovery_ranks", "--draft", "self", "--context", "64", "--prompts", "1", **places)
    assert itself["agreement"] == 1.0, "a window of everything"
    grid = figures_of(
        "grid",
        *tiny[:2],
        "--draft",
        "self",
        "--context",
        "1024",
        "--rounds",
        "2",
        "--batch",
        "1",
        "64",
        "--depth",
        "2",
        "--host-memory",
        "20MiB",
        **places,
    )
    assert list(grid["points"]) == ["1"], "64 requests do not fit"
    (point,) = grid["points"].values()
    assert point["sequential"][0]["depth"] == 2
    assert grid["least_over_sequential"] == grid["mean_over_sequential"] == point["over_sequential"]
    useless = figures_of("useless_draft", *few, "--draft", "tiny", "--context", "1024", **places)
    assert useless["rounds_until_off"] == MOST_USELESS_ROUNDS
    assert useless["over_off"] > 0
    offloaded = figures_of("offloaded_baseline", *tiny, "--new-tokens", "8", "--cache", "dynamic", **places)
    assert offloaded["times_faster"] == pytest.approx(offloaded["transformers_token_ms"] / offloaded["token_ms"])


def test_weights_that_a_round_reads() -> None:
    def read_bytes(module: nn.Module) -> int:
        return BenchModel("any", module).read_bytes

    tied, apart = model("qwen3"), model("llama")
    assert read_bytes(tied) == sum(parameter.nbytes for parameter in tied.parameters())
    table: Any = apart.get_parameter("model.embed_tokens.weight")
    assert read_bytes(apart) == sum(parameter.nbytes for parameter in apart.parameters()) - table.nbytes


def test_shapes_of_attention_are_checked() -> None:
    pytest.importorskip("triton")
    kernels = script("attention_kernels")
    assert kernels.asked_shape("8x32768x5") == kernels.Shape(8, 32768, 5)
    for wrong in ("8x5", "8x5x1x1", "axbxc"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no shape like"):
            kernels.asked_shape(wrong)
