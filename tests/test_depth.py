"""What `num_speculative_tokens="auto"` stands for, for Qwen3-8B and a draft of Qwen3-0.6B on an H200, by prediction."""

from __future__ import annotations

from typing import Any

import pytest

import specstream
from specstream.depth import DEPTHS, Depths, choose_depth, depths_of, expected_tokens
from specstream.errors import InvalidOption, OutOfBudget
from specstream.memory import MemoryPlan
from specstream.options import MOST_AUTO_CANDIDATES, Options
from specstream.planner import Planner
from specstream.speculate import ASSUMED_ACCEPTANCE
from tests.helpers import model, prompt, reference
from tests.test_policy import plans

GIB = 1 << 30


def chosen(free: int, least_that_fits: int = 0, **options: Any) -> int:
    defaults: dict[str, Any] = {"max_model_len": 32_768, "max_num_seqs": 1, "gpu_kv_budget": "2GiB"}
    fitting = plans(free=free)

    def planned(settings: Options) -> tuple[MemoryPlan, Planner]:
        if least_that_fits and settings.most_candidates > least_that_fits:
            raise OutOfBudget("no")
        return fitting(settings)

    return choose_depth(Options(**defaults | options), planned)


def test_candidates_are_many_where_drafting_is_hidden_and_few_where_it_is_not() -> None:
    streamed, resident = chosen(8 * GIB), chosen(64 * GIB, gpu_kv_budget="auto")
    assert 12 <= streamed <= MOST_AUTO_CANDIDATES
    assert 2 <= resident <= 4  # a step takes a quarter of a verification


def test_candidates_are_no_more_than_fit() -> None:
    assert chosen(8 * GIB, least_that_fits=3) == 3
    with pytest.raises(OutOfBudget):
        chosen(8 * GIB, gpu_kv_budget="1KiB")


def test_tokens_of_a_round_are_a_geometric_series() -> None:
    a = ASSUMED_ACCEPTANCE
    assert expected_tokens(a, 4) == pytest.approx((1 - a**5) / (1 - a))
    assert expected_tokens(1.0, 4) == 5


def test_an_engine_decides_when_it_is_made() -> None:
    target = model("qwen3")
    with specstream.compile(target, target, max_model_len=128, num_speculative_tokens="auto") as engine:
        assert 1 <= engine.options.most_candidates <= MOST_AUTO_CANDIDATES
        assert engine.options.num_speculative_tokens == engine.options.most_candidates
        out: Any = engine.generate([list(prompt(20))], max_new_tokens=20)
    assert out[0, 20:].tolist() == reference(target, prompt(20), 20).tokens
    with specstream.compile(target, None, max_model_len=128, num_speculative_tokens="auto") as engine:
        assert engine.options.num_speculative_tokens == 1


def test_a_length_of_made_up_acceptance_needs_a_number() -> None:
    with pytest.raises(InvalidOption, match="num_speculative_tokens: got 'auto'; allowed: a number of candidates"):
        Options(num_speculative_tokens="auto", rejection_sample_method="synthetic", synthetic_acceptance_length=3.0)


def depths(free: int, depth: int = 8, **options: Any) -> Depths | None:
    defaults: dict[str, Any] = {"max_model_len": 32_768, "max_num_seqs": 1, "drafting": "sequential"}
    given = Options(**defaults | options, num_speculative_tokens=depth)
    return depths_of(given, *plans(free=free)(given))


def test_a_request_is_drafted_for_as_far_as_its_own_acceptance_pays() -> None:
    resident = depths(64 * GIB)
    assert resident is not None
    assert list(resident.periods_us) == [depth for depth in DEPTHS if depth <= 8]
    best = [resident.best(acceptance) for acceptance in (0.05, 0.3, 0.6, 0.8, 0.9, 0.99)]
    assert best == sorted(best)
    assert best[0] == 1
    assert best[-1] == 8
    streamed = depths(8 * GIB, gpu_kv_budget="2GiB")
    assert streamed is not None
    assert streamed.best(0.3) == 8, "more cost nothing: the ring holds what the link brings meanwhile"


def test_where_drafting_is_beside_the_target_all_are_drafted_for_alike() -> None:
    assert depths(64 * GIB, max_num_seqs=2, drafting="cohorts") is None
    assert depths(64 * GIB, drafting="lookahead") is None
