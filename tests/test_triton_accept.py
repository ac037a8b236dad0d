"""The kernels that choose tokens, in Triton's interpreter, against the rules of the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from specstream.kernels import accept as accept_module
from specstream.kernels import philox, threshold
from specstream.kernels import process as process_module
from specstream.kernels.accept import Best
from specstream.kernels.process import process
from specstream.sampling import Noise, Purpose
from tests.accept_cases import (
    CORNERS,
    FEW_AND_MANY,
    INF,
    NEUTRAL,
    DraftMethod,
    Method,
    accept_round,
    check_accepted,
    check_best,
    check_processed,
    check_proposed,
    expected,
    odd_logits,
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
    """So that tiny rows have several tiles, and that top-k may leave more of them than there is room for."""
    monkeypatch.setattr(accept_module, "TILE", 16)
    monkeypatch.setattr(process_module, "TILE", 64)
    monkeypatch.setattr(process_module, "CAPACITY", 8)


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
    check_processed(process(logits, **setting_tensors(rows, used))[0], logits, rows, used)


@pytest.mark.parametrize("used", [["temperature"], ["top_k"], ["top_p"], ["min_p"], list(NEUTRAL), []], ids="+".join)
@pytest.mark.parametrize("vocab", [8, 96])
def test_settings_are_applied_as_transformers_does(used: list[str], vocab: int) -> None:
    check_settings(torch.randn(len(CORNERS), vocab) * 3, CORNERS, used)
    check_settings(random_scores(len(CORNERS), vocab, ties=True), CORNERS, used)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each call of `process` to come, how many tokens top-k leaves of each row."""
    noted: list[list[int]] = []

    def find_survivors(*arguments: Any) -> threshold.Survivors:
        found = threshold.find_survivors(*arguments)
        noted.append(found.count.tolist())
        return found

    monkeypatch.setattr(process_module, "find_survivors", find_survivors)
    return noted


def test_top_p_of_what_top_k_leaves_be_it_few_or_many(counts: list[list[int]]) -> None:
    """Few are gathered, for many the vocabulary is searched, row by row: of one batch, and of the same settings."""
    check_settings(torch.randn(5, 96) * 3, FEW_AND_MANY, ["top_k", "top_p"])
    assert counts.pop() == [5, 96, 50, 8, 1]
    check_settings(random_scores(5, 96, ties=True), FEW_AND_MANY, ["top_k", "top_p"])
    assert min(counts.pop()) > 8
    logits = torch.randn(5, 96) * 3
    logits[0, 40:44] = logits[3, 30:34] = 20.0  # ties that there is room for
    check_settings(logits, FEW_AND_MANY, ["temperature", "top_k", "top_p"])
    assert counts.pop() == [5, 96, 50, 8, 1]


@pytest.mark.parametrize("ties", [False, True])
def test_how_many_are_gathered_changes_nothing(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even which of equal scores top-p keeps."""
    logits, settings = random_scores(5, 70, ties), setting_tensors(FEW_AND_MANY, ["top_k", "top_p"])
    results = []
    for room in (1, 8, 128):
        monkeypatch.setattr(process_module, "CAPACITY", room)
        results.append(process(logits, **settings)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_only_rows_with_few_survivors_do_without_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the passes of top-p, these rows are right and no others."""
    logits, used = torch.randn(5, 96) * 3, ["top_k", "top_p"]
    search = threshold._search

    def search_counts(scores: Tensor, wanted: Tensor, sums: Tensor, mass: bool, *others: Any) -> Tensor:
        return sums.new_zeros(len(scores), 8, 2) if mass else search(scores, wanted, sums, mass, *others)

    monkeypatch.setattr(threshold, "_search", search_counts)
    processed, _ = process(logits, **setting_tensors(FEW_AND_MANY, used))
    for row, settings in enumerate(FEW_AND_MANY):
        one = processed[row : row + 1], logits[row : row + 1], [settings], used
        if row in (1, 2):
            with pytest.raises(AssertionError):
                check_processed(*one)
        else:
            check_processed(*one)


@pytest.mark.parametrize("used", [[], ["temperature"], list(NEUTRAL)], ids="+".join)
def test_what_is_no_distribution_shows_in_the_best_score(used: list[str]) -> None:
    """Whatever the sign of a NaN: in a key's order, one with a sign is the lowest."""
    logits = odd_logits(8, 96)
    assert logits[1].isnan().any()
    assert logits[1][logits[1].isnan()].signbit().all()
    given = random_round(4, 1, 96)
    given.seats.candidates_count[:], given.row_start[:] = 1, torch.tensor([2, 0, 6, 4])  # the seats' rows
    settings = setting_tensors([NEUTRAL | {"temperature": 0.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1}] * 8, used)
    given.scores, keys = process(logits, **settings)
    best = torch.zeros(4, 2)
    accept_round(given, "coupled", Best(keys, best))
    best = best[[1, 0, 3, 2]].flatten()
    check_best(best, logits, settings.get("temperature"))
    assert best.isfinite().tolist() == [False] * 3 + [True] + [False] * 3 + [True]
    with pytest.raises(AssertionError):
        check_best(best, logits.nan_to_num(nan=-INF), settings.get("temperature"))


def test_a_step_notes_the_best_scores_of_the_seats_that_are_in_it() -> None:
    given, logits = random_round(4, 3, 50), odd_logits(4, 50)
    given.seats.candidates_count[:] = torch.tensor([3, 2, 1, 3])
    scores, keys = process(logits)
    best = torch.full((4, 3), 7.0)
    propose_step(given, scores, 1, "coupled", "probabilistic", Best(keys, best))
    check_best(best[[0, 1, 3], 1], logits[[0, 1, 3]])
    best[[0, 1, 3], 1] = 7.0
    assert (best == 7).all()


def test_what_is_accepted_is_written_where_it_is_wanted() -> None:
    given = random_round(4, 3, 50)
    out = torch.full((4,), 9, dtype=torch.int32), torch.full((4, 4), 9)
    accept_module.accept(given.seats, given.scores, given.row_start, "coupled", out=out)
    check_accepted(given, "coupled", out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_on_a_real_vocabulary(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "TILE", 1 << 16)
    monkeypatch.setattr(process_module, "CAPACITY", 64)
    check_settings((torch.randn(2, 151_936) * 3).to(dtype), [CORNERS[3], CORNERS[1]], list(NEUTRAL))
    check_settings((torch.randn(1, 151_936) * 3).to(dtype), [CORNERS[3] | {"top_k": 0}], ["top_p"])


def test_other_settings_are_noticed() -> None:
    logits = torch.randn(len(CORNERS), 96) * 3
    processed, _ = process(logits, **setting_tensors(CORNERS, list(NEUTRAL)))
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
    kept = process(torch.zeros(1, 96), top_p=torch.tensor([0.25], dtype=torch.float64))[0][0] == 0
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
