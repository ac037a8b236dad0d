"""`specstream.plan`: what it predicts is what an engine's own parts do, and what it finds fits."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specstream
from specstream.depth import expected_tokens
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.fit import plan
from specstream.fit_models import make_setup
from specstream.fit_report import FitReport
from specstream.fit_setup import largest
from specstream.graph import PartitionedModel
from specstream.models.tiny import DRAFT, TARGET
from specstream.options import parse_size
from specstream.planning import Planning
from specstream.policy import choose_drafting, verified_us
from specstream.profiles import H200, find_profile
from tests.helpers import captured, model

PAIR = ("qwen3-8b", "qwen3-0.6b")


def long(**changes: Any) -> FitReport:
    given: dict[str, Any] = {"context": 131_072, "draft_window": 1024, "device": "rtx-4090"}
    return plan(*PAIR, **given | changes)


def test_a_long_context_on_a_small_device_is_bound_by_the_link() -> None:
    began = time.perf_counter()
    report = long()
    assert time.perf_counter() - began < 15  # it takes half a second
    assert report.fits
    assert report.prediction is not None
    assert report.prediction.bound_by == "link"
    assert report.prediction.exposed_draft_ms == 0
    assert report.prediction.link_utilization == pytest.approx(1, abs=0.01)
    assert report.prediction.link_floor_ms == pytest.approx(report.prediction.streamed_bytes / 26e6)
    expected = 1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4
    assert report.prediction.tokens_per_second == pytest.approx((1000 * expected / report.prediction.round_ms,))
    assert report.memory is not None
    assert report.memory.capacity == 24 * 10**9
    assert report.memory.left is not None
    assert report.memory.left > 0
    assert report.memory.host == 144 * 1024 * 131_072
    assert any("YaRN" in note for note in report.notes)


def test_it_is_by_what_an_engine_would_plan() -> None:
    """For a model that is captured, too: the same memory, policy and period."""
    real: PartitionedModel = captured(model("qwen3"))
    setup, _ = make_setup(TARGET, DRAFT, 2048, 4, "h200", "400MiB", None, {"gpu_kv_budget": "12MiB"})
    assert choose_drafting(setup.least_options, setup.planning.planned)[0] in ("sequential", "cohorts")
    report = plan(TARGET, DRAFT, context=2048, batch=4, device="h200", fit_gpu="400MiB", gpu_kv_budget="12MiB")
    assert report.prediction is not None
    period = verified_us(report.options, *setup.planning.planned(report.options))
    assert report.prediction.rounds * report.prediction.round_ms == pytest.approx(period / 1e3)
    planning = Planning(real, None, H200, 1 << 30, 1 << 30)
    assert planning.settled(replace(report.options, num_speculative_tokens="auto")).num_speculative_tokens == 1


def test_what_lookahead_foresees_is_said_and_what_it_does_not_is_reckoned_with() -> None:
    report = plan(*PAIR, context=32_768, draft_window=1024, gpu_kv_budget="2GiB", acceptance=(0.5, 0.9))
    assert (report.options.drafting, report.options.num_speculative_tokens) == ("lookahead", 4)
    assert report.prediction is not None
    assert report.prediction.foreseen is not None
    low, high = report.prediction.foreseen
    assert 0.5 < low < high < 1
    assert f"{low:.0%} to {high:.0%} of outcomes foreseen" in str(report)
    for chance, rate in zip(report.acceptance, report.prediction.tokens_per_second, strict=True):
        if_all_were_foreseen = 1e3 * expected_tokens(chance, 4) / report.prediction.round_ms
        assert 0.9 * if_all_were_foreseen < rate < if_all_were_foreseen
    cohorts = plan(*PAIR, context=8192, batch=2, draft_window=1024, gpu_kv_budget="1GiB", drafting="cohorts")
    assert cohorts.figures()["foreseen"] is None


def test_cohorts_are_not_chosen_where_fewer_requests_would_run_at_once() -> None:
    """Two groups' distributions take more: as many as fit by one policy are not refused for another."""
    shape: dict[str, Any] = {"context": 4096, "device": "l40s", "batch": 169}
    report = plan("qwen3-0.6b", "self", **shape)
    assert report.fits
    assert report.options.drafting == "sequential"
    cohorts = plan("qwen3-0.6b", "self", **shape, drafting="cohorts")
    assert cohorts.reason is not None
    assert "of 169 requests run at once" in cohorts.reason


def test_acceptance_means_nothing_where_nothing_drafts() -> None:
    for report in (plan(PAIR[0], None, context=8192, device="rtx-4090"), long(drafting="off")):
        assert report.figures()["acceptance"] is None
        assert "acceptance" not in str(report)
    assert long().figures()["acceptance"] == 0.8
    assert "at acceptance 0.8" in str(long())


def test_a_range_of_acceptance_and_a_number_of_candidates_that_is_chosen() -> None:
    report = long(acceptance=(0.5, 0.9), num_speculative_tokens="auto")
    assert report.prediction is not None
    low, high = report.prediction.tokens_per_second
    assert low < high
    assert isinstance(report.options.num_speculative_tokens, int)
    assert report.figures()["tokens_per_second"] == (low, high)


def test_what_does_not_fit_says_which_changes_would_make_it() -> None:
    report = long(draft_window=None)
    assert not report.fits
    assert report.prediction is None
    assert report.reason is not None
    assert "max_num_seqs" not in report.reason
    assert report.memory is not None
    assert report.memory.left is not None
    assert report.memory.left < 0
    assert "draft_window=1024 fits" in report.advice
    assert "it fits on l40s" in report.advice
    (shorter,) = (text for text in report.advice if text.startswith("a context of"))
    context = int(shorter.split()[3])
    assert long(draft_window=None, context=context).fits
    assert not long(draft_window=None, context=context + 64).fits


def test_only_changes_with_which_all_requests_fit_are_named() -> None:
    """An engine's own way out is for one request at a time."""
    given: dict[str, Any] = {"batch": 8, "device": "h100", "host_kv_budget": "4GiB", "draft_window": None}
    report = long(context=65_536, **given)
    assert report.reason is not None
    assert report.reason.endswith("host_kv_budget is 4.00 GiB")
    lengths = [int(text.split()[3]) for text in report.advice if text.startswith("a context of")]
    assert all(long(context=each, **given).fits for each in lengths)
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        ({"draft_window": None}, True, False),
        ({"host_kv_budget": "4GiB"}, False, True),
        ({"gpu_kv_budget": "100MiB", "host_kv_budget": "4GiB"}, True, True),
        ({"gpu_kv_budget": "100MiB", "batch": 3}, True, False),
        ({"gpu_kv_budget": "min", "batch": 3}, True, False),
        ({"fit_gpu": "12GiB"}, True, False),
        ({"host_kv_budget": "20GiB", "batch": 3, "device": "h100", "gpu_kv_budget": "2GiB"}, False, True),
    ],
)
def test_what_is_short_is_told_and_so_much_more_is_just_enough(
    options: dict[str, Any], device: bool, host: bool
) -> None:
    report = long(**options)
    short, memory = report.short, report.memory
    assert short is not None
    assert memory is not None
    assert (short.device > 0, short.host > 0) == (device, host)

    def with_more(missing: int) -> FitReport:
        more = dict(options)
        if short.host:
            more["host_kv_budget"] = parse_size("", options["host_kv_budget"]) + short.host - missing
        if short.of_budget:
            given = options.get("gpu_kv_budget", "auto")
            least = parse_size("", given) if given != "min" else 228_589_568  # a tail and a ring
            more["gpu_kv_budget"] = least + short.device - missing * (not host)
        elif short.device:
            assert memory.capacity is not None
            more["fit_gpu"] = memory.capacity + short.device - missing * (not host)
        return long(**more)

    assert with_more(0).fits
    assert not with_more(1).fits


def test_more_host_memory_is_advised_where_it_is_short() -> None:
    report = long(host_kv_budget="4GiB")
    (advised,) = (text for text in report.advice if text.startswith("host_kv_budget"))
    size = advised.split('"')[1]
    assert long(host_kv_budget=size).fits
    assert "short of                 " not in str(long())
    assert "GiB of host memory\n" in str(report)
    assert report.memory is not None
    assert report.memory.host_budget == 4 << 30


def test_a_budget_is_advised_where_the_automatic_one_is_too_small() -> None:
    options: dict[str, Any] = {
        "context": 65_536,
        "batch": 8,
        "device": "h100",
        "draft_window": None,
        "fit_gpu": "80GiB",
    }
    report = long(**options)
    (advised,) = (text for text in report.advice if text.startswith("gpu_kv_budget"))
    assert long(**options, gpu_kv_budget=advised.split('"')[1]).fits


def test_smaller_chunks_are_advised_if_they_fit() -> None:
    options: dict[str, Any] = {"context": 4096, "device": "h200", "gpu_kv_budget": "1MiB"}
    report = plan(TARGET, None, chunk_tokens=512, **options)
    (advised,) = (text for text in report.advice if text.startswith("chunk_tokens="))
    assert plan(TARGET, None, chunk_tokens=int(advised.split()[0].partition("=")[2]), **options).fits


def test_fewer_candidates_than_would_be_chosen_may_fit() -> None:
    options: dict[str, Any] = {"context": 64, "batch": 3, "device": "h200", "chunk_tokens": 1, "gpu_kv_budget": "25KiB"}
    report = plan("tiny", "tiny", num_speculative_tokens=8, **options)
    assert not report.fits
    assert "num_speculative_tokens=1 fits" in report.advice
    assert plan("tiny", "tiny", num_speculative_tokens=1, **options).fits


def test_weights_that_do_not_fit_are_the_reason() -> None:
    report = long(fit_gpu="12GiB")
    assert report.reason == "the weights take 16.37 GiB; the device has 12.00 GiB"
    assert report.advice[-1] == "it fits on rtx-4090"


def test_a_request_that_fits_alone_need_not_stream_with_all_others() -> None:
    report = long(context=16_384, batch=8)
    assert any("rotating requests gives more throughput" in text for text in report.advice)
    assert not any("rotating" in text for text in long().advice)


def test_a_draft_that_does_not_pay_is_told() -> None:
    report = long(acceptance=0.0)
    assert any("at an acceptance of 0: drafting does not pay" in text for text in report.advice)
    assert not any("does not pay" in text for text in long(acceptance=0.9).advice)


@pytest.mark.parametrize(("device", "hidden"), [("h100", True), ("gh200", False)])
def test_behind_a_fast_link_drafting_is_not_hidden(device: str, hidden: bool) -> None:
    report = long(context=8192, device=device, gpu_kv_budget="600MiB", staging_slots=8, drafting="sequential")
    assert report.fits
    assert any("the target takes longer than the link" in text for text in report.advice) == (not hidden)


def test_questions_the_other_way_round() -> None:
    given: dict[str, Any] = {"device": "rtx-4090", "host_kv_budget": "64GiB"}
    report = plan(*PAIR, context=16_384, **given, max_context=True, max_batch=True, min_gpu=True)
    assert report.max_context
    assert report.max_batch
    assert report.min_gpu in ("rtx-4090", "rtx-3090")
    for context, batch, fits in (
        (report.max_context, 1, True),
        (report.max_context + 1, 1, False),
        (16_384, report.max_batch, True),
        (16_384, report.max_batch + 1, False),
    ):
        assert (
            make_setup(*PAIR, context, batch, "rtx-4090", None, None, {"host_kv_budget": "64GiB"})[0].refusal() is None
        ) == fits


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_bisection_finds_the_limit(least: int, more: int, limit: int) -> None:
    most = least + more
    found = largest(least, most, lambda number: number <= limit)
    assert found == (0 if limit < least else min(limit, most))


SETUP = make_setup(*PAIR, 16_384, 1, "h200", "24GiB", None, {})[0]


@settings(deadline=None, max_examples=15)
@given(st.integers(19, 60), st.integers(1, 20), st.integers(1, 12))
def test_more_memory_or_fewer_requests_never_shorten_the_context(gibibytes: int, more: int, batch: int) -> None:
    def at(size: int, requests: int) -> int:
        profile = replace(SETUP.profile, device_memory_bytes=size << 30)
        return replace(SETUP, profile=profile).at(batch=requests).max_context()

    context = at(gibibytes, batch)
    assert at(gibibytes + more, batch) >= context
    assert at(gibibytes, batch + 1) <= context


@settings(deadline=None, max_examples=15)
@given(st.integers(1000, 100_000), st.integers(1, 50_000))
def test_longer_requests_are_never_more(context: int, more: int) -> None:
    assert SETUP.at(context=context + more).max_batch() <= SETUP.at(context=context).max_batch()


def test_a_preset_reaches_any_context_and_a_checkpoint_its_own() -> None:
    assert plan(TARGET, None, context=1024, max_context=True).max_context == 32_768
    with pytest.raises(InvalidOption, match="context: got 40000; allowed: at most 32768"):
        plan(TARGET, None, context=40_000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_model_len": 64}, "max_model_len: got 64; allowed: none here: it is called context"),
        ({"context": 2}, "context: got 2"),
        ({"context": "many"}, "context: got 'many'"),
        ({"batch": 0}, "batch: got 0"),
        ({"device": "tpu"}, "device: got 'tpu'; allowed: h200, h100"),
        ({"acceptance": 1.5}, "acceptance: got 1.5"),
        ({"acceptance": (0.9, 0.1)}, "acceptance: got"),
        ({"fit_gpu": "big"}, "fit_gpu: got 'big'"),
        ({"device": "cpu", "fit_gpu": "1GiB"}, "fit_gpu: got '1GiB'; allowed: None for cpu"),
        ({"draft": None, "draft_window": 8}, "draft_window: got 8"),
        ({"target": "no such model"}, "target: got 'no such model'; allowed: qwen3-8b"),
        ({"depth": 3}, "depth: got 3; allowed: no such option"),
        ({"target": None}, "target: got None; allowed: the name of a preset, a directory, or a config.json"),
        ({"target": b"tiny"}, "target: got b'tiny'; allowed: the name of a preset"),
        ({"target": torch.nn.Identity()}, "Of a model that is loaded, specstream.compile plans."),
        ({"target": "a" * 5000}, "File name too long"),
        ({"draft": 5}, 'draft: got 5; allowed: the name of a preset, a directory, or a config.json, "self" or None'),
        ({"draft": "None"}, '"self" or None'),
        ({"dtype": torch.int8}, "dtype: got torch.int8; allowed: None or torch.float64 or torch.float32"),
        ({"dtype": "bfloat16"}, "dtype: got 'bfloat16'; allowed: None or torch.float64"),
        ({"device": None}, "device: got None; allowed: the name of a listed device"),
        ({"device": torch.device("cpu")}, "allowed: the name of a listed device"),
        ({"acceptance": -0.1}, "acceptance: got -0.1; allowed: a number from 0 to 1"),
        ({"acceptance": None}, "acceptance: got None"),
        ({"context": 0}, "context: got 0; allowed: a number of tokens from 3 to 1073741824."),
        ({"context": None}, "context: got None; allowed: a number of tokens"),
        ({"context": True}, "context: got True; allowed: a number of tokens"),
        ({"max_context": 4096}, "max_context: got 4096; allowed: True or False"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    right: dict[str, Any] = {"target": "tiny", "draft": "tiny", "context": 64}
    with pytest.raises(InvalidOption) as refused:
        plan(**right | arguments)
    assert said in str(refused.value)


def test_a_target_drafts_for_itself_without_further_weights() -> None:
    report = plan("tiny", "self", context=64)
    assert report.draft == "self"
    assert report.memory is not None
    assert report.memory.draft_weights == 0
    assert report.memory.draft_kv > 0


def test_it_is_public() -> None:
    assert specstream.plan is plan
    assert specstream.FitReport is FitReport
    assert find_profile("h200") is H200


REFUSED: dict[str, dict[str, Any]] = {
    "a sliding window of 64 tokens": {"model_type": "mistral", "sliding_window": 64},
    "it caps attention scores": {"model_type": "gemma2", "sliding_window": 4096},
    "its attention is not causal": {"model_type": "bert"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_an_engine_would_refuse_does_not_fit(said: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 96, **shape, **REFUSED[said]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=said):
        plan(file, context=200, device="cpu")


def test_a_report_reads_as_the_command_shows_it() -> None:
    lines = str(plan(TARGET, DRAFT, context=400, device="cpu")).splitlines()
    assert "1 x 400 tokens" in lines[0]
    assert lines[1].split() == ["fits", "yes"]
    assert max(map(len, lines)) < 200
