"""The kernels that choose tokens on the device, at real sizes and in CUDA graphs, against the rules of the host."""

from __future__ import annotations

import copy

import pytest
import torch

from specstream.kernels import process as process_module
from specstream.kernels.accept import Best
from specstream.kernels.philox import uniform
from specstream.kernels.process import process
from specstream.sampling import Noise, Purpose
from tests.accept_cases import (
    CORNERS,
    FEW_AND_MANY,
    NEUTRAL,
    DraftMethod,
    Method,
    accept_round,
    check_accepted,
    check_best,
    check_processed,
    check_proposed,
    odd_logits,
    propose_step,
    random_round,
    random_scores,
    setting_tensors,
)

VOCAB = 151_936
SEATS = 8
DEVICE = torch.device("cuda")

both = pytest.mark.parametrize("method", ["standard", "coupled"])


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_numbers_are_the_hosts_bit_for_bit(purpose: Purpose) -> None:
    seeds, positions = torch.tensor([0, -1, 2**63 - 1]), torch.tensor([5, 2**40, 131_071])
    numbers = uniform(seeds.to(DEVICE), positions.to(DEVICE), purpose, VOCAB).cpu()
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        assert torch.equal(numbers[row], Noise(seed).uniform(position, purpose, VOCAB))


@both
@pytest.mark.parametrize(("depth", "dtype"), [(4, torch.float64), (4, torch.float32), (16, torch.float64)])
def test_accepting_rounds_again_and_again_in_a_graph(method: Method, depth: int, dtype: torch.dtype) -> None:
    given = random_round(SEATS, depth, VOCAB, dtype=dtype)
    static = given.to(DEVICE)
    check_accepted(given, method, accept_round(static, method))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = accept_round(static, method)
    for seed in range(2):
        torch.manual_seed(seed)
        given = random_round(SEATS, depth, VOCAB, ties=seed == 1, dtype=dtype)
        static.copy_(given)
        graph.replay()
        check_accepted(given, method, result)


@both
@pytest.mark.parametrize("draft_method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("seats", [1, SEATS])
def test_proposing_steps_in_a_graph(method: Method, draft_method: DraftMethod, seats: int) -> None:
    depth, step = 4, 2
    static = random_round(seats, depth, VOCAB).to(DEVICE)
    static_scores = torch.zeros(seats, VOCAB, device=DEVICE)
    propose_step(static, static_scores, step, method, draft_method)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        propose_step(static, static_scores, step, method, draft_method)
    for seed in range(3):
        torch.manual_seed(seed)
        before, scores = random_round(seats, depth, VOCAB), random_scores(seats, VOCAB, ties=seed == 1)
        static.copy_(before)
        static_scores.copy_(scores)
        graph.replay()
        check_proposed(before, copy.deepcopy(static), scores, step, method, draft_method)


@pytest.mark.parametrize("used", [["temperature"], ["top_k"], ["top_p"], ["min_p"], list(NEUTRAL)], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [96, VOCAB])
def test_settings_in_a_graph(used: list[str], dtype: torch.dtype, vocab: int) -> None:
    static = {name: value.to(DEVICE) for name, value in setting_tensors(CORNERS, used).items()}
    static_logits = torch.zeros(len(CORNERS), vocab, dtype=dtype, device=DEVICE)
    process(static_logits, **static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        processed, _ = process(static_logits, **static)
    for turn in range(3):
        rows = CORNERS[turn:] + CORNERS[:turn]
        logits = (torch.randn(len(rows), vocab) * 3).to(dtype)
        static_logits.copy_(logits)
        for name, value in setting_tensors(rows, used).items():
            static[name].copy_(value)
        graph.replay()
        check_processed(processed, logits, rows, used)


@pytest.mark.parametrize("room", [8, 512])
def test_top_p_of_what_top_k_leaves_be_it_few_or_many(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, by what a replay finds in each."""
    monkeypatch.setattr(process_module, "CAPACITY", room)
    used = ["temperature", "top_k", "top_p"]
    static = {name: value.to(DEVICE) for name, value in setting_tensors(FEW_AND_MANY, used).items()}
    static_logits = torch.zeros(len(FEW_AND_MANY), VOCAB, device=DEVICE)
    process(static_logits, **static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        processed, _ = process(static_logits, **static)
    for turn in range(4):
        torch.manual_seed(turn)
        rows = FEW_AND_MANY[turn:] + FEW_AND_MANY[:turn]
        logits = random_scores(len(rows), VOCAB, ties=turn == 1)
        static_logits.copy_(logits)
        for name, value in setting_tensors(rows, used).items():
            static[name].copy_(value)
        graph.replay()
        check_processed(processed, logits, rows, used)


@pytest.mark.parametrize("used", [[], ["temperature"], list(NEUTRAL)], ids="+".join)
def test_what_is_no_distribution_shows_in_the_best_score(used: list[str]) -> None:
    logits, given = odd_logits(8, VOCAB), random_round(4, 1, VOCAB)
    given.seats.candidates_count[:], given.row_start[:] = 1, torch.arange(0, 8, 2)
    given = given.to(DEVICE)
    settings = setting_tensors([NEUTRAL | {"temperature": 0.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1}] * 8, used)
    given.scores, keys = process(logits.to(DEVICE), **{name: value.to(DEVICE) for name, value in settings.items()})
    best = torch.zeros(4, 2, device=DEVICE)
    accept_round(given, "coupled", Best(keys, best))
    check_best(best.flatten().cpu(), logits, settings.get("temperature"))
