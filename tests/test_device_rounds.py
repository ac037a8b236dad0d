"""Rounds whose acceptance and drafting are the kernels', in Triton's interpreter, against the rules of the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
)

pytest.importorskip("triton")

from specstream import block_window, draft, planning
from specstream.cuda_draft import CudaDrafter
from specstream.device_accept import SeatTables
from specstream.device_rounds import DeviceRounds
from specstream.draft import Drafter, DraftWindow
from specstream.engine import Engine
from specstream.errors import InvalidDistribution, OutOfBudget
from specstream.kernels import accept as accept_module
from specstream.kernels import process as process_module
from specstream.kernels import tiling
from specstream.metrics import Metrics
from specstream.profiles import H200
from specstream.scheduler import RequestRows
from specstream.sequence import Sequence
from specstream.speculate import Candidates
from tests.architectures import build
from tests.helpers import captured, check_free, make_engine, prompt, reference

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy: what is made of NaN
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other; and blocks are to be crossed by short texts."""
    monkeypatch.setattr(tiling, "MAX_SPLITS", 1)
    monkeypatch.setattr(accept_module, "TILE", 128)
    monkeypatch.setattr(process_module, "TILE", 128)
    monkeypatch.setattr(block_window, "BLOCK_TOKENS", 8)
    for module in (block_window, draft):
        monkeypatch.setattr(module, "FEED_TOKENS", 8)


@cache
def tiny() -> torch.nn.Module:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return build("qwen3", torch.float32, 0, eos_token_id=None, **shape)


def engine_of(target: Any, draft_model: Any, kernels: bool, **options: Any) -> Engine:
    """An engine of the CPU's; or one that drafts as on a CUDA device, and has the kernels choose its tokens."""
    given: dict[str, Any] = {"max_model_len": 64, "chunk_tokens": 8, "max_num_seqs": 3} | options
    engine = make_engine(target, draft_model, **given)
    its, spec = engine._speculator, captured(target).spec
    if not kernels:
        return engine
    drafter = None
    if draft_model is not None:
        window = DraftWindow(given["max_model_len"], given.get("draft_window"), given.get("draft_sink", 4))
        assert its.drafter is not None
        branches = its.drafter.branches
        drafter = CudaDrafter(captured(draft_model), window, spec.vocab_size, given["max_num_seqs"], branches)
    depth, seats = engine.options.most_candidates, engine.options.max_num_seqs
    beside = given.get("drafting") in ("cohorts", "lookahead")
    rounds = DeviceRounds(its.speculation, drafter, depth, seats, spec.vocab_size, spec.device, beside)
    its.drafter, its.kernels = drafter, rounds
    if its.lookahead is not None:
        assert drafter is not None
        its.lookahead.drafter = drafter
    return engine


def texts(engine: Engine, prompts: list[list[int]], **arguments: Any) -> tuple[Any, ...]:
    """What an engine generates, and how it got there."""
    with engine:
        out: Any = engine.generate(prompts, return_dict_in_generate=True, **arguments)
        metrics = engine.metrics()
    counts = metrics.num_draft_tokens, metrics.num_accepted_tokens, metrics.accepted_per_position
    return [each.token_ids for each in out.requests], [each.finish_reason for each in out.requests], counts


def check_same(target: Any, drafting: Any, prompts: list[list[int]], options: dict[str, Any], **arguments: Any) -> Any:
    host, device = (
        texts(engine_of(target, drafting, kernels, **options), prompts, **arguments) for kernels in (False, True)
    )
    assert device == host
    return device


@cache
def near() -> torch.nn.Module:
    """A draft that often agrees with the target."""
    drafting = copy.deepcopy(tiny())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafting.parameters():
            weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=generator))
    return drafting


POLICIES: dict[str, dict[str, Any]] = {
    "sequential": {"drafting": "sequential"},
    "cohorts": {"drafting": "cohorts"},
    "lookahead": {"drafting": "lookahead", "lookahead_branches": 4},
}


@pytest.mark.parametrize(("drafting", "depth"), [("sequential", 1), ("cohorts", 2), ("lookahead", 1)])
def test_what_was_loaded_before_changes_nothing(drafting: str, depth: int) -> None:
    options = POLICIES[drafting] | {"num_speculative_tokens": depth}
    engine = engine_of(tiny(), near(), kernels=True, **options)
    rounds = engine._speculator.kernels
    assert rounds is not None
    rounds.load_kernels(torch.float32)
    other = engine_of(tiny(), near(), kernels=True, **options)
    assert texts(engine, PROMPTS[:2], max_new_tokens=6) == texts(other, PROMPTS[:2], max_new_tokens=6)


@pytest.mark.parametrize("drafting", POLICIES)
def test_distributions_take_what_is_planned(drafting: str) -> None:
    engine = engine_of(tiny(), near(), kernels=True, num_speculative_tokens=2, **POLICIES[drafting])
    engine.generate(PROMPTS[:2], max_new_tokens=6, **SAMPLED)
    rounds, options = engine._speculator.kernels, engine.options
    assert rounds is not None
    plan = planning.Planning(engine.parts.target, engine.parts.draft, H200, 1 << 40)
    assert plan.drawn_from(options) == rounds.drawn_from_bytes > 0
    memory = plan.memory(options)
    assert memory.drawn_from == rounds.drawn_from_bytes
    assert plan.drawn_from(replace(options, rejection_sample_method="coupled")) == 0
    work, given = plan.work(options), replace(options, gpu_kv_budget=memory.device_kv)
    assert work is not None
    least = memory.device_kv + memory.draft_kv + memory.drawn_from + work.least
    with pytest.raises(OutOfBudget, match="its distributions"):
        replace(plan, free_device=least - 1).memory(given)
    replace(plan, free_device=least).memory(given)
    engine.close()
    assert rounds.drawn_from_bytes == 0


PROMPTS = [list(prompt(9)), list(prompt(21, 1)), list(prompt(4, 2))]
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 1, "temperature": 0.7, "top_k": 0}


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("drafting", ["none", "near", "itself"])
def test_greedy(depth: int, drafting: str) -> None:
    drafter = {"none": None, "near": near(), "itself": tiny()}[drafting]
    options = {"num_speculative_tokens": depth}
    _, _, (proposed, accepted, _) = check_same(tiny(), drafter, PROMPTS, options, max_new_tokens=9)
    assert {"none": proposed == 0, "near": 0 < accepted < proposed, "itself": accepted == proposed > 0}[drafting]


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize("draft_method", ["greedy", "probabilistic"])
def test_sampling(method: str, draft_method: str) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3, "rejection_sample_method": method}
    options["draft_sample_method"] = draft_method
    _, _, (proposed, accepted, _) = check_same(tiny(), near(), PROMPTS[:2], options, max_new_tokens=9, **SAMPLED)
    assert 0 < accepted < proposed


@pytest.mark.parametrize("method", ["greedy", "standard", "coupled"])
def test_cohorts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not verify is drafted for beside the round, by the kernels too."""
    beside = 0
    tell_known = SeatTables.tell_known

    def counted(self: SeatTables, rows: list[RequestRows]) -> None:
        nonlocal beside
        beside += 1
        tell_known(self, rows)

    monkeypatch.setattr(SeatTables, "tell_known", counted)
    options: dict[str, Any] = {"num_speculative_tokens": 3, "drafting": "cohorts"}
    arguments: dict[str, Any] = {} if method == "greedy" else SAMPLED
    options |= {} if method == "greedy" else {"rejection_sample_method": method}
    _, _, (proposed, accepted, _) = check_same(tiny(), near(), PROMPTS, options, max_new_tokens=9, **arguments)
    assert 0 < accepted < proposed
    assert beside > 4


def steps_of(
    engine: Engine, requests: list[tuple[int, tuple[int, ...], dict[str, Any]]]
) -> tuple[dict[int, list[int]], list[str], Metrics]:
    """Submits each request before the round that it names; what all of them produce, and what goes wrong."""
    waiting, tokens, errors, rounds = list(requests), dict[int, list[int]](), list[str](), 0
    with engine:
        while waiting or engine.has_unfinished:
            while waiting and waiting[0][0] <= rounds:
                _, ids, arguments = waiting.pop(0)
                tokens[engine.submit(ids, **arguments)] = []
            try:
                for output in engine.step():
                    tokens[output.request_id] += output.new_token_ids
            except (InvalidDistribution, OwnError) as error:
                errors.append(str(error))
            rounds += 1
        check_free(engine)
        return tokens, errors, engine.metrics()


class OwnError(Exception):
    """Of a round."""


def config(**settings: Any) -> GenerationConfig:
    return GenerationConfig(**{"do_sample": True, "top_k": 0} | settings)


MIXED: list[tuple[int, tuple[int, ...], dict[str, Any]]] = [
    (0, prompt(19), {"max_new_tokens": 8}),
    (1, prompt(3), {"max_new_tokens": 5, "seed": 5, "generation_config": config(temperature=0.6, top_k=9)}),
    (2, prompt(9), {"max_new_tokens": 4, "seed": 6, "generation_config": config(top_p=0.7, min_p=0.05)}),
    (5, prompt(5), {"max_new_tokens": 4, "seed": 7, "generation_config": config(min_p=0.1, temperature=1.3)}),
]
"""Ragged requests that join when there is a seat, of different settings."""


def check_same_steps(
    requests: list[tuple[int, tuple[int, ...], dict[str, Any]]],
    target: Any,
    drafting: Any,
    before: Callable[[Engine], None] = lambda engine: None,
    **options: Any,
) -> tuple[list[str], DeviceRounds]:
    """Runs requests on the host and on the device; returns what went wrong, and what the device had."""
    results = []
    for kernels in (False, True):
        engine = engine_of(target, drafting, kernels, **options)
        before(engine)
        tokens, errors, metrics = steps_of(engine, requests)
        counts = metrics.num_draft_tokens, metrics.num_accepted_tokens, metrics.accepted_per_position
        results.append((tokens, errors, counts))
    assert results[0] == results[1]
    assert engine._speculator.kernels is not None
    return results[1][1], engine._speculator.kernels


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_requests_of_all_settings_join_and_leave(method: str) -> None:
    check_same_steps(MIXED, tiny(), near(), num_speculative_tokens=2, rejection_sample_method=method)


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_a_drafter_without_kernels_drafts_on_the_host(method: str) -> None:
    def on_the_host(engine: Engine) -> None:
        speculator, drafting = engine._speculator, captured(near())
        if speculator.kernels is not None:
            speculator.kernels.drafter = None
            speculator.drafter = Drafter(drafting, DraftWindow(64, None, 4), drafting.spec.vocab_size, 3)

    requests = MIXED[:2]
    check_same_steps(requests, tiny(), near(), on_the_host, num_speculative_tokens=2, rejection_sample_method=method)


def test_an_end_token_in_the_middle_of_a_block() -> None:
    ids = next(ids for seed in range(99) if len(set(reference(tiny(), ids := prompt(9, seed), 12).tokens[:6])) == 6)
    alone = reference(tiny(), ids, 12).tokens
    for at in (3, 5):
        request = {"max_new_tokens": 12, "eos_token_id": alone[at]}
        engine = engine_of(tiny(), tiny(), True, num_speculative_tokens=4)
        tokens, _, _ = steps_of(engine, [(0, ids, request), (1, prompt(4), {"max_new_tokens": 7})])
        assert tokens[0] == alone[: at + 1]
        assert tokens[1] == reference(tiny(), prompt(4), 7).tokens


def test_a_window_in_blocks_that_are_used_in_turn() -> None:
    """What is dropped depends on where a catch-up began, so that the proposals are not the host's to the letter."""
    ids = prompt(30)
    options = {"num_speculative_tokens": 3, "draft_window": 5, "max_num_seqs": 1, "max_model_len": 96}
    engine = engine_of(tiny(), tiny(), True, **options)
    (tokens,), _, (proposed, accepted, _) = texts(engine, [list(ids)], max_new_tokens=16)
    assert tokens == reference(tiny(), ids, 16).tokens
    assert 0 < accepted < proposed


def test_positions_that_the_draft_does_not_have() -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    drafting = build("qwen3", torch.float32, 0, eos_token_id=None, max_position_embeddings=20, **shape)
    drafting.load_state_dict(tiny().state_dict())
    with pytest.warns(UserWarning, match="covers 20 positions"):
        _, _, (proposed, accepted, _) = check_same(tiny(), drafting, PROMPTS[:1], {}, max_new_tokens=20)
    assert accepted == proposed > 0


@pytest.mark.parametrize(("target_size", "draft_size"), [(128, 120), (120, 128)])
def test_vocabularies_padded_to_different_sizes(target_size: int, draft_size: int) -> None:
    target, drafting = (
        build("qwen3", torch.float32, 0, vocab_size=size, num_hidden_layers=1) for size in (target_size, draft_size)
    )
    ids = [*range(target_size - 10, target_size), 3, 5]
    options = {"num_speculative_tokens": 2, "rejection_sample_method": "standard"}
    check_same(target, drafting, [ids], options, max_new_tokens=6, **SAMPLED)


def spoiled(logits: Tensor, value: float) -> Tensor:
    """Rows of logits whose best token is one of many, or others, all of one value."""
    return logits.masked_fill((logits.argmax(-1, keepdim=True) % 4) == 1, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_draft_without_a_distribution(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sized = Drafter.sized
    monkeypatch.setattr(Drafter, "sized", lambda self, logits: spoiled(sized(self, logits), value))
    check_same_steps(MIXED[:2], tiny(), near(), num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("value", "method"), [(float("nan"), "standard"), (float("inf"), "coupled"), (-float("inf"), "standard")]
)
def test_a_target_without_a_distribution(value: float, method: str) -> None:
    """The same errors after the same tokens, for each request alone."""

    def spoil(engine: Engine) -> None:
        speculator: Any = engine._speculator
        accept = speculator.accept
        speculator.accept = lambda rows, logits: accept(rows, spoiled(logits, value))

    errors, _ = check_same_steps(MIXED, tiny(), near(), spoil, num_speculative_tokens=3, rejection_sample_method=method)
    assert len(errors) >= 2


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_rounds_of_the_host_in_between(method: str) -> None:
    """A request that the kernels do not serve comes and goes: candidates change hands with their probabilities."""
    penalty = {"max_new_tokens": 3, "generation_config": config(repetition_penalty=1.2), "seed": 8}
    longer = [(0, prompt(5), {"max_new_tokens": 16, "generation_config": config(temperature=0.7), "seed": 1})]
    requests = [*longer, (2, prompt(7), penalty), (5, prompt(8), penalty | {"logprobs": True})]
    check_same_steps(requests, tiny(), near(), num_speculative_tokens=2, rejection_sample_method=method)


def failing_often(work: Callable[..., Any]) -> Callable[..., Any]:
    calls = count()

    def fail(*arguments: Any) -> Any:
        if next(calls) % 3 == 2:
            raise OwnError
        return work(*arguments)

    return fail


def test_a_round_that_failed_is_run_again() -> None:
    """Wherever it failed. Under standard, candidates whose probabilities are overwritten are not verified."""
    requests = [(0, ids, arguments) for _, ids, arguments in MIXED[:2]]
    plain = steps_of(engine_of(tiny(), None, False, rejection_sample_method="coupled"), requests)[0]
    for where in ("draft", "read"):
        engine = engine_of(tiny(), tiny(), True, num_speculative_tokens=2, rejection_sample_method="coupled")
        kernels = engine._speculator.kernels
        assert kernels is not None
        setattr(kernels, where, failing_often(getattr(kernels, where)))
        tokens, errors, _ = steps_of(engine, requests)
        assert tokens == plain
        assert errors
    sequence = Sequence(0, 1, 9, frozenset(), [1], candidates=Candidates([2], [torch.ones(3)]))
    engine._speculator.forget(sequence)
    assert sequence.candidates == Candidates()


@pytest.mark.filterwarnings("ignore:acceptance is made up")
@pytest.mark.parametrize("chosen", [{"synthetic_acceptance_rate": 0.6}, {"synthetic_acceptance_length": 2.4}])
def test_synthetic_acceptance(chosen: dict[str, float]) -> None:
    options = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic", **chosen}
    check_same(tiny(), near(), PROMPTS[:2], options, max_new_tokens=9, **SAMPLED)
    check_same(tiny(), near(), PROMPTS[:2], options, max_new_tokens=9, seed=1)
