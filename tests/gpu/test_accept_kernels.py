"""The kernels that choose tokens on the device, at real sizes and in CUDA graphs, against the rules of the host."""

from __future__ import annotations

import copy

import pytest
import torch

from specstream.kernels.philox import uniform
from specstream.kernels.process import process
from specstream.sampling import Noise, Purpose
from tests.accept_cases import (
    CORNERS,
    NEUTRAL,
    DraftMethod,
    Method,
    accept_round,
    check_accepted,
    check_processed,
    check_proposed,
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
        processed = process(static_logits, **static)
    for turn in range(3):
        rows = CORNERS[turn:] + CORNERS[:turn]
        logits = (torch.randn(len(rows), vocab) * 3).to(dtype)
        static_logits.copy_(logits)
        for name, value in setting_tensors(rows, used).items():
            static[name].copy_(value)
        graph.replay()
        check_processed(processed, logits, rows, used)
