"""Acceptance made up to measure costs: as many candidates as asked for, all the work done, the output labelled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import specstream
from specstream.errors import InvalidOption
from tests.helpers import make_engine, model, prompt

OPTIONS: dict[str, Any] = {
    "max_model_len": 320,
    "chunk_tokens": 32,
    "rejection_sample_method": "synthetic",
    "num_speculative_tokens": 5,
    "gpu_kv_budget": "min",
}


SEEDED = {"do_sample": True, "seed": 3}


@pytest.mark.parametrize(
    ("draft_seed", "length", "sampling"), [(0, 2.0, {}), (1, 3.4, {}), (1, 3.4, SEEDED), (0, 1.0, SEEDED), (1, 6.0, {})]
)
def test_a_length_is_met_whatever_the_draft(draft_seed: int, length: float, sampling: dict[str, Any]) -> None:
    with make_engine(
        model("qwen3"), model("qwen3", seed=draft_seed), synthetic_acceptance_length=length, **OPTIONS
    ) as engine:
        out: Any = engine.generate(
            [list(prompt(9))], max_new_tokens=300, return_dict_in_generate=True, logprobs=True, **sampling
        )
        metrics = engine.metrics()
    assert metrics.mean_acceptance_length == pytest.approx(length, rel=0.1)
    assert metrics.num_draft_tokens > 4.8 * metrics.num_verify_rounds, "a draft was turned off: its costs are missing"
    (request,) = out.requests
    assert request.synthetic
    assert len(request.logprobs) == len(request.token_ids) == 300


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_a_rate_is_met_at_every_place(rate: float) -> None:
    with make_engine(model("qwen3"), model("qwen3", seed=1), synthetic_acceptance_rate=rate, **OPTIONS) as engine:
        enough = 250 if 0 < rate < 1 else 60
        engine.generate([list(prompt(9, seed)) for seed in range(4)], max_new_tokens=enough)
        shares = engine.metrics().acceptance_per_position
    for place, share in enumerate(shares):
        assert share == pytest.approx(rate ** (place + 1), abs=0.1)


def test_it_is_reproducible() -> None:
    with make_engine(model("qwen3"), model("qwen3", seed=1), synthetic_acceptance_rate=0.6, **OPTIONS) as engine:
        first, second = (engine.generate([list(prompt(9))], max_new_tokens=60, seed=1) for _ in range(2))
    assert first.tolist() == second.tolist()  # type: ignore[union-attr]


def test_compile_warns_and_real_output_is_not_labelled() -> None:
    with pytest.warns(UserWarning, match="the output of this engine is not the target's"):
        specstream.compile(
            model("qwen3"),
            model("qwen3"),
            max_model_len=64,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rate=0.5,
        ).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with specstream.compile(model("qwen3"), model("qwen3"), max_model_len=64) as engine:
            out: Any = engine.generate([list(prompt(9))], max_new_tokens=3, return_dict_in_generate=True)
            assert not out.requests[0].synthetic


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method: got 'synthetic with neither'; allowed: synthetic with one of "
            "synthetic_acceptance_rate and synthetic_acceptance_length.",
        ),
        (
            {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rate": 0.5,
                "synthetic_acceptance_length": 2,
            },
            "rejection_sample_method: got 'synthetic with synthetic_acceptance_rate and synthetic_acceptance_length'",
        ),
        (
            {"synthetic_acceptance_rate": 0.5},
            'synthetic_acceptance_rate: got 0.5; allowed: None without rejection_sample_method="synthetic".',
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1.5},
            "synthetic_acceptance_rate: got 1.5; allowed: a number from 0 to 1.",
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 9, "num_speculative_tokens": 5},
            "synthetic_acceptance_length: got 9; allowed: a number from 1 to 6.",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidOption) as error:
        specstream.Options.from_keywords(**options)
    assert text in str(error.value)
