"""Acceptance and drafts on a CUDA device: the tokens of the host's rules, and nobody waits before a round's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specstream.cuda_executor import CudaExecutor
from specstream.device_rounds import DeviceRounds
from specstream.engine import Engine
from specstream.lane_streams import LaneStreams
from specstream.recurring import GraphPool, Recurring
from specstream.round_plan import Lane
from specstream.scheduler import RequestRows
from specstream.streams import new_stream
from tests.architectures import build
from tests.helpers import make_engine, prompt

PROMPTS = [list(prompt(150)), list(prompt(9, 1)), list(prompt(40, 2))]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"do_sample": True, "top_k": 0, "temperature": 0.8, "seed": 3},
    "all": {"do_sample": True, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7, "seed": 3},
}


def small(seed: int = 0) -> torch.nn.Module:
    return build("qwen3", torch.float32, seed, eos_token_id=None, head_dim=64).to("cuda")


def near(target: torch.nn.Module) -> torch.nn.Module:
    """A draft that often agrees with the target."""
    drafting = small()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for weight, own in zip(drafting.parameters(), target.parameters(), strict=True):
            noise = torch.randn(own.shape, generator=generator, device="cuda")
            weight.copy_(own + 0.2 * own.std() * noise)
    return drafting


def new_engine(
    target: torch.nn.Module, drafting: torch.nn.Module | None, **options: Any
) -> tuple[Engine, DeviceRounds]:
    given: dict[str, Any] = {
        "max_model_len": 256,
        "chunk_tokens": 16,
        "gpu_kv_budget": "min",
        "max_num_seqs": 3,
    } | options
    engine = make_engine(target, drafting, **given)
    kernels = engine._speculator.kernels
    assert kernels is not None
    return engine, kernels


def run(engine: Engine, **arguments: Any) -> tuple[list[list[int]], int, int]:
    """The tokens of all prompts, with candidates proposed and accepted."""
    before = engine.metrics()
    out: Any = engine.generate(PROMPTS, max_new_tokens=40, return_dict_in_generate=True, **arguments)
    after = engine.metrics()
    proposed = after.num_draft_tokens - before.num_draft_tokens
    return [each.token_ids for each in out.requests], proposed, after.num_accepted_tokens - before.num_accepted_tokens


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_tokens_are_those_of_the_hosts_rules(settings: str, method: str) -> None:
    """In float32; where two logits, or a random number and its bound, agree to a few digits they may differ."""
    target = small()
    engine, kernels = new_engine(target, near(target), num_speculative_tokens=4, rejection_sample_method=method)
    with engine:
        first, second = (run(engine, **SETTINGS[settings]) for _ in range(2))
        assert first == second, "once interpreted, once replayed"
        graphs = [step._captured for draft in kernels._drafts.values() for step in draft._steps.values()]
        assert any(graphs)
        engine._speculator.kernels = None
        host = run(engine, **SETTINGS[settings])
    same = sum(own == other for own, other in zip(first[0], host[0], strict=True))
    assert same == len(PROMPTS), (first, host)
    assert 0 < first[2] < first[1]
    assert abs(first[2] - host[2]) <= 2


@pytest.mark.parametrize("settings", SETTINGS)
def test_without_a_draft(settings: str) -> None:
    engine, _ = new_engine(small(), None)
    with engine:
        device = run(engine, **SETTINGS[settings])
        engine._speculator.kernels = None
        assert run(engine, **SETTINGS[settings]) == device


@pytest.mark.parametrize("window", [None, 70])
def test_a_draft_that_is_the_target_agrees_with_it(window: int | None) -> None:
    """Over blocks of 64 tokens, and a window that drops some."""
    target = small()
    engine, _ = new_engine(target, target, draft_window=window, num_speculative_tokens=4, max_model_len=1024)
    with engine:
        out: Any = engine.generate([list(prompt(600))], max_new_tokens=300)
        metrics = engine.metrics()
        engine._speculator.kernels = None
        again: Any = engine.generate([list(prompt(600))], max_new_tokens=300)
    assert torch.equal(out, again)
    if window is None:
        assert metrics.draft_acceptance_rate is not None
        assert metrics.draft_acceptance_rate > 0.99


class Strict:
    """Acceptance and draft steps of rounds without prompts, which may not wait for the device."""

    def __init__(self, kernels: DeviceRounds) -> None:
        self._prepare, self._accept, self._draft = kernels.prepare, kernels.accept, kernels.draft
        self.steps = 0
        self._verifies = False

    def prepare(self, rows: list[RequestRows], drafted: list[RequestRows] | None = None) -> bool:
        self._verifies = not any(row.prompt for row in rows)
        with self._no_waiting():
            return self._prepare(rows, drafted)

    def accept(self, logits: Tensor) -> None:
        with self._no_waiting():
            self._accept(logits)

    def draft(self) -> None:
        self.steps += self._verifies
        with self._no_waiting():
            self._draft()

    @contextmanager
    def _no_waiting(self) -> Iterator[None]:
        untyped: Any = torch.cuda
        if self._verifies:
            untyped.set_sync_debug_mode("error")
        try:
            yield
        finally:
            untyped.set_sync_debug_mode("default")


def test_nothing_waits_before_the_rounds_end() -> None:
    """Once everything is captured: neither acceptance nor a draft step reads anything back."""
    target = small()
    engine, kernels = new_engine(target, near(target), num_speculative_tokens=4)
    with engine:
        before = [run(engine, **settings) for settings in SETTINGS.values()]
        strict: Any = Strict(kernels)
        for name in ("prepare", "accept", "draft"):
            setattr(kernels, name, getattr(strict, name))
        assert [run(engine, **settings) for settings in SETTINGS.values()] == before
    assert strict.steps > 100


def test_the_time_of_draft_steps_is_known() -> None:
    target = small()
    engine, _ = new_engine(target, target, num_speculative_tokens=4)
    executor = engine._executor
    assert isinstance(executor, CudaExecutor)
    with engine:
        run(engine)
        assert executor.draft_seconds is not None
        assert 0 < executor.draft_seconds < 1
    engine, _ = new_engine(target, None)
    executor = engine._executor
    assert isinstance(executor, CudaExecutor)
    with engine:
        run(engine)
        assert executor.draft_seconds is None


@pytest.mark.filterwarnings("ignore:acceptance is made up")
def test_synthetic_acceptance() -> None:
    target = small()
    options = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5, "num_speculative_tokens": 4}
    engine, _ = new_engine(target, near(target), **options)
    with engine:
        device = run(engine, seed=1)
        engine._speculator.kernels = None
        assert run(engine, seed=1) == device


def test_half_precision_and_a_draft_of_another_vocabulary() -> None:
    target = build("qwen3", torch.bfloat16, 0, eos_token_id=None, head_dim=64, vocab_size=130).to("cuda")
    drafting = build("qwen3", torch.bfloat16, 0, eos_token_id=None, head_dim=64, vocab_size=96).to("cuda")
    engine, _ = new_engine(target, drafting, rejection_sample_method="coupled", num_speculative_tokens=3)
    with engine:
        for settings in SETTINGS.values():
            results = [run(engine, **settings) for _ in range(4)]
            assert results[2] == results[3], "all is replayed"
            assert results[0][1] > 0


def test_draft_steps_have_the_lower_priority_wherever_they_are_captured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    priorities = list[int]()
    numbers = torch.zeros(8, device=device)

    def work() -> Tensor:
        priorities.append(torch.cuda.current_stream().priority)
        return numbers + 1

    streams = LaneStreams.on(device)
    assert streams is not None
    recurring, target = Recurring(work, GraphPool(streams.draft_steps)), streams.lanes[Lane.TARGET]
    with torch.cuda.stream(target):
        for _ in range(3):
            result = recurring()
    target.synchronize()
    assert result.tolist() == [1.0] * 8
    high, low = target.priority, streams.lanes[Lane.DRAFT].priority
    assert priorities == [high, low]
    assert high < low


def test_graphs_of_one_pool_share_its_memory_and_its_stream() -> None:
    """A library's memory for a stream, 32 MiB on an H200, is there once, however many numbers of rows are captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows, weights = torch.ones(8, 4096, device=device), torch.ones(4096, 64, device=device)
    pool, reserved = GraphPool(new_stream(device, high_priority=False)), list[int]()
    for count in range(2, 9):
        recurring = Recurring(partial(torch.matmul, rows[:count], weights), pool)
        results = [recurring().tolist() for _ in range(3)]
        assert results == [[[4096.0] * 64] * count] * 3
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[0] < 8 << 20, reserved


def test_an_interrupt_within_a_capture_leaves_the_pool_usable() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool, numbers = GraphPool(new_stream(device, high_priority=False)), torch.zeros(8, device=device)
    strikes = list[bool]()

    def work() -> Tensor:
        twice = numbers + numbers
        if torch.cuda.is_current_stream_capturing() and strikes and strikes.pop():
            raise KeyboardInterrupt
        return twice + 1

    for struck in (False, True, False):
        strikes.append(struck)
        recurring = Recurring(work, pool)
        recurring()
        if struck:
            with pytest.raises(KeyboardInterrupt):
                recurring()
        assert [recurring().tolist() for _ in range(3)] == [[1.0] * 8] * 3
