"""The kernels that choose tokens, in Triton's interpreter, against the rules of the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from specstream.kernels import accept as accept_module
from specstream.kernels import philox
from specstream.kernels import process as process_module
from specstream.kernels.process import process
from specstream.sampling import Noise, Purpose
from tests.accept_cases import (
    CORNERS,
    INF,
    NEUTRAL,
    DraftMethod,
    Method,
    accept_round,
    check_accepted,
    check_processed,
    check_proposed,
    expected,
    propose_step,
    random_round,
    random_scores,
    setting_tensors,
)

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy: -inf less -inf
]

both = pytest.mark.parametrize("method", ["standard", "coupled"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny rows have several tiles."""
    monkeypatch.setattr(accept_module, "TILE", 16)
    monkeypatch.setattr(process_module, "TILE", 64)


def test_purposes_are_those_of_the_host() -> None:
    assert {name: getattr(philox, name).value for name in Purpose.__members__} == {p.name: p.value for p in Purpose}


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("count", [1, 5, 1030])
def test_uniform_numbers_are_the_hosts_bit_for_bit(purpose: Purpose, count: int) -> None:
    seeds = torch.tensor([0, 3, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 5, 2**40, 7, 1])
    numbers = philox.uniform(seeds, positions, purpose, count)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        assert torch.equal(numbers[row], Noise(seed).uniform(position, purpose, count))


@both
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [5, 50, 64])
def test_accepting_a_round(method: Method, ties: bool, vocab: int) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        given = random_round(4, 3, vocab, ties=ties, dtype=torch.float32 if seed % 3 == 0 else torch.float64)
        check_accepted(given, method, accept_round(given, method))


@both
def test_the_rounds_reach_every_outcome(method: Method) -> None:
    """Else the comparisons with the host would show little."""
    outcomes = set()
    for seed in range(6):
        torch.manual_seed(seed)
        given = random_round(4, 3, 50)
        for seat, count in enumerate(given.seats.candidates_count.tolist()):
            result = expected(given, seat, method)
            kind = "absent" if result is None else "all" if result[0] == count else "some" if result[0] else "none"
            outcomes.add((kind, bool(given.seats.do_sample[seat])))
    assert {(kind, True) for kind in ("all", "some", "none")} <= outcomes
    assert {kind for kind, _ in outcomes} == {"absent", "all", "some", "none"}


def test_a_round_without_candidates_and_a_row_without_tokens() -> None:
    given = random_round(2, 0, 20)
    given.scores[1] = -INF
    given.seats.do_sample[0] = False
    check_accepted(given, "coupled", accept_round(given, "coupled"))


@both
def test_a_changed_seed_or_position_is_noticed(method: Method) -> None:
    given = random_round(4, 3, 50)
    given.seats.do_sample[:] = True
    result = accept_round(given, method)
    for name in ("seeds", "positions"):
        changed = copy.deepcopy(given)
        getattr(changed.seats, name).add_(1)
        with pytest.raises(AssertionError):
            check_accepted(changed, method, result)


@both
@pytest.mark.parametrize("draft_method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_proposing_a_step(method: Method, draft_method: DraftMethod, dtype: torch.dtype) -> None:
    for step in range(3):
        before = random_round(4, 3, 50, dtype=dtype)
        scores = random_scores(4, 50, ties=step == 1)
        after = copy.deepcopy(before)
        propose_step(after, scores, step, method, draft_method)
        check_proposed(before, after, scores, step, method, draft_method)


def check_settings(logits: torch.Tensor, rows: list[dict[str, Any]], used: list[str]) -> None:
    """Processes with the settings `used`, a row of `rows` for each row of logits, and compares."""
    check_processed(process(logits, **setting_tensors(rows, used)), logits, rows, used)


@pytest.mark.parametrize("used", [["temperature"], ["top_k"], ["top_p"], ["min_p"], list(NEUTRAL), []], ids="+".join)
@pytest.mark.parametrize("vocab", [8, 96])
def test_settings_are_applied_as_transformers_does(used: list[str], vocab: int) -> None:
    check_settings(torch.randn(len(CORNERS), vocab) * 3, CORNERS, used)
    check_settings(random_scores(len(CORNERS), vocab, ties=True), CORNERS, used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_on_a_real_vocabulary(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "TILE", 1 << 16)
    check_settings((torch.randn(2, 151_936) * 3).to(dtype), [CORNERS[3], CORNERS[1]], list(NEUTRAL))
    check_settings((torch.randn(1, 151_936) * 3).to(dtype), [CORNERS[3] | {"top_k": 0}], ["top_p"])


def test_other_settings_are_noticed() -> None:
    logits = torch.randn(len(CORNERS), 96) * 3
    processed = process(logits, **setting_tensors(CORNERS, list(NEUTRAL)))
    for name, value in {"temperature": 0.9, "top_k": 2, "top_p": 0.3, "min_p": 0.5}.items():
        with pytest.raises(AssertionError):
            check_processed(processed, logits, [corner | {name: value} for corner in CORNERS], list(NEUTRAL))


def test_rows_of_a_wider_tensor() -> None:
    logits = torch.randn(len(CORNERS), 100)[:, :90]
    check_settings(logits, CORNERS, list(NEUTRAL))


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 262145"):
        process(torch.zeros(1, 262_145))
    given = random_round(2, 1, 8)
    with pytest.raises(ValueError, match="draft_probabilities"):
        accept_module.accept(given.seats, given.scores, given.row_start, "standard")


def test_of_equal_scores_at_the_bound_the_last_are_kept() -> None:
    kept = process(torch.zeros(1, 96), top_p=torch.tensor([0.25], dtype=torch.float64))[0] == 0
    assert kept.nonzero()[:, 0].tolist() == list(range(72, 96))


SCORES = st.sampled_from([-INF, -3.0, -0.0, 0.0, 0.125, 1.0, 2.5, 20.0]) | st.floats(-30, 30, width=32)


@given(
    st.lists(SCORES, min_size=8, max_size=8),
    st.floats(0.05, 5),
    st.integers(0, 10),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_any_settings(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    row = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    check_settings(torch.tensor([[*logits, 0.5]]), [row], list(row))
