"""The engine on a CUDA device: the tokens of the CPU path, with rounds interpreted and replayed from graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import specstream
from specstream.cuda_executor import CudaExecutor
from specstream.engine import Engine
from specstream.models import tiny
from specstream.models.load import load_model
from tests.architectures import build
from tests.helpers import Request, make_engine, prompt, serve


def cuda_engine(target: Any, draft: Any, *, compiled: bool = False, **options: Any) -> tuple[Engine, CudaExecutor]:
    """Without Inductor, which takes most of a test's time, unless it is asked for."""
    make = specstream.compile if compiled else make_engine
    engine = make(target, draft, **options)
    assert isinstance(engine._executor, CudaExecutor)
    return engine, engine._executor


SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "llama3": {"head_dim": 96},
    "phi3": {"hidden_size": 128},
    "gemma": {"head_dim": 256},
    "smollm": {"head_dim": 4},  # too small for the kernels
}


@pytest.mark.parametrize("budget", ["min", "512KiB", "auto"])
@pytest.mark.parametrize("name", SIZES)
def test_requests_that_join_and_leave_get_the_targets_tokens(name: str, budget: str) -> None:
    """Ragged requests, chunks of 16 tokens; float32, where near-ties are one in tens of thousands."""
    target = build(name, torch.float32, 0, eos_token_id=None, **SIZES[name]).to("cuda")
    draft = build(name, torch.float32, 0, eos_token_id=None, **SIZES[name]).to("cuda")
    expected = build(name, torch.float32, 0, eos_token_id=None, **SIZES[name])
    options: dict[str, Any] = {"max_model_len": 256, "chunk_tokens": 16, "max_num_seqs": 3, "debug": True}
    engine, executor = cuda_engine(target, draft, compiled=budget == "512KiB", gpu_kv_budget=budget, **options)
    with engine:
        requests = [Request(prompt(150), 60), Request(prompt(9), 80, joins=2), Request(prompt(40), 33, joins=9)]
        serve(engine, requests)
        assert bool(executor._graphs) == (name != "smollm"), "which rounds are replayed"
        assert engine.metrics().mean_acceptance_length > 4.5
    with specstream.compile(expected, None, max_model_len=256) as alone:
        for request in requests:
            out: Any = alone.generate([list(request.prompt)], max_new_tokens=request.max_new_tokens)
            assert request.tokens == out[0, len(request.prompt) :].tolist()


def test_the_bundled_pair_gives_the_same_tokens_as_on_the_cpu() -> None:
    """Float32, everything streamed, replayed; 50 prompts, near-ties counted."""
    folder = Path(tiny.__file__).parent
    target, tokenizer, _ = load_model(folder / "target", torch.float32, "cuda")
    draft, _, _ = load_model(folder / "draft", torch.float32, "cuda")
    on_cpu, _, _ = load_model(folder / "target", torch.float32, "cpu")
    chooser = random.Random(0)
    prompts = [[chooser.randrange(3, 1000) for _ in range(chooser.randrange(20, 400))] for _ in range(50)]
    options: dict[str, Any] = {"max_model_len": 512, "chunk_tokens": 64, "gpu_kv_budget": "min", "max_num_seqs": 8}
    options |= {"staging_slots": 2, "group_chunks": 4}
    engine, executor = cuda_engine(target, draft, **options)
    with engine:
        ours: Any = engine.generate(prompts, max_new_tokens=64, eos_token_id=[], return_dict_in_generate=True)
        assert executor._graphs
    with specstream.compile(on_cpu, None, max_model_len=512) as alone:
        theirs: Any = alone.generate(
            prompts, max_new_tokens=64, eos_token_id=[], return_dict_in_generate=True, output_logits=True
        )
    ties = 0
    for own, other in zip(ours.requests, theirs.requests, strict=True):
        if own.token_ids == other.token_ids:
            continue
        first = next(i for i, pair in enumerate(zip(own.token_ids, other.token_ids, strict=True)) if pair[0] != pair[1])
        best = other.logits[first].topk(2).values
        assert best[0] - best[1] < 1e-3, f"token {first}: the two best logits are {best.tolist()}"
        ties += 1
    print(f"\nbundled pair: {ties} of 50 prompts differ, each at a near-tie")
    assert ties <= 2


@pytest.mark.parametrize("budget", ["512KiB", "auto"])
@pytest.mark.parametrize("drafting", ["cohorts", "lookahead"])
def test_drafting_beside_the_target_leaves_its_tokens(drafting: str, budget: str) -> None:
    """Rounds are replayed while draft steps, of other requests or for what these may come to, run beside them."""
    target = build("qwen3", torch.float32, 0, eos_token_id=None, head_dim=64).to("cuda")
    expected = build("qwen3", torch.float32, 0, eos_token_id=None, head_dim=64)
    options: dict[str, Any] = {"max_model_len": 256, "chunk_tokens": 16, "max_num_seqs": 4, "debug": True}
    options |= {"group_chunks": 4, "staging_slots": 3}  # so that rounds recur
    engine, executor = cuda_engine(target, target, drafting=drafting, gpu_kv_budget=budget, **options)
    with engine:
        requests = [Request(prompt(150 - 20 * number, number), 80, joins=2 * number) for number in range(4)]
        serve(engine, requests)
        assert any(key[0].drafts_beside for key in executor._graphs)
        metrics = engine.metrics()
        assert metrics.mean_acceptance_length > 4
        assert (metrics.lookahead_hit_rate > 0.9) == (drafting == "lookahead")
    with specstream.compile(expected, None, max_model_len=256) as alone:
        for request in requests:
            out: Any = alone.generate([list(request.prompt)], max_new_tokens=80)
            assert request.tokens == out[0, len(request.prompt) :].tolist()


def test_half_precision_and_sampling() -> None:
    target = build("qwen3", torch.bfloat16, 0, eos_token_id=None, head_dim=64).to("cuda")
    engine, executor = cuda_engine(
        target,
        target,
        compiled=True,
        max_model_len=512,
        chunk_tokens=32,
        gpu_kv_budget="min",
        rejection_sample_method="coupled",
    )
    with engine:
        arguments: dict[str, Any] = {"max_new_tokens": 100, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
        # A round is captured when it occurs again: from the third call on all are replayed, bit by bit alike.
        ids = [list(prompt(300)), list(prompt(20))]
        calls: list[Any] = [engine.generate(ids, seed=1, **arguments) for _ in range(4)]
        assert calls[2].tolist() == calls[3].tolist()
        assert executor._graphs


@pytest.mark.parametrize(("head_dim", "drafts"), [(64, "catch_up"), (8, "start")])
def test_a_failed_round_leaves_the_engine_usable(head_dim: int, drafts: str) -> None:
    """Whether kernels draft, or, with heads too small for them, the host does."""
    target = build("qwen3", torch.float32, 0, eos_token_id=None, head_dim=head_dim).to("cuda")
    engine, _ = cuda_engine(target, target, max_model_len=256, chunk_tokens=16, gpu_kv_budget="min")

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    with engine:
        plain: Any = engine.generate([list(prompt(100))], max_new_tokens=40)
        request = engine.submit(prompt(100), max_new_tokens=40)
        given: list[int] = []
        drafter: Any = engine._speculator.drafter
        working = getattr(drafter, drafts)
        for number in range(100):
            if number in (2, 5):  # neither of them the last, in which the host need not draft
                setattr(drafter, drafts, fail)
                with pytest.raises(RuntimeError, match="no"):
                    engine.step()
                setattr(drafter, drafts, working)
            for output in engine.step():
                given += output.new_token_ids
            if not engine.has_unfinished:
                break
        assert request >= 0
        assert given == plain[0, 100:].tolist()


class Watched:
    """Notes what an executor does in its rounds, and what it is asked to wait for between them."""

    def __init__(self, engine: Engine, executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in ("_launch", "_capture", "drain"):
            monkeypatch.setattr(executor, name, self._noted(name, getattr(executor, name)))
        monkeypatch.setattr(engine._speculator, "settle", self._noted("settle", engine._speculator.settle))

    def _noted(self, name: str, work: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.events.append(name)
            return work(*arguments)

        return call


def streaming_requests(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Engine, CudaExecutor, Watched]:
    target = build("qwen3", torch.float32, 0, eos_token_id=None, head_dim=64).to("cuda")
    given: dict[str, Any] = {"max_model_len": 1024, "chunk_tokens": 16, "max_num_seqs": 3, "group_chunks": 4}
    given |= {"staging_slots": 3, "num_speculative_tokens": 4}
    engine, executor = cuda_engine(target, target, **given | options)
    return engine, executor, Watched(engine, executor, monkeypatch)


def test_rounds_are_captured_and_planned_while_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture comes after a launch and before the result is read; a second graph does what the interpreter did."""
    engine, executor, watched = streaming_requests(monkeypatch, gpu_kv_budget="min", debug=True)
    with engine:
        first: Any = engine.generate([list(prompt(300))], max_new_tokens=200)
        at = [number for number, event in enumerate(watched.events) if event == "_capture"]
        assert at
        for number in at:
            before = [event for event in watched.events[:number] if event in ("_launch", "settle")]
            assert before[-1] == "_launch"
        assert "drain" not in watched.events
        second: Any = engine.generate([list(prompt(300))], max_new_tokens=200)
        assert first.tolist() == second.tolist()
        assert all(rotation == 0 for _, _, rotation, *_ in executor._graphs), "three slots divide three layers"
        assert engine._planner.num_ahead > 0


def ragged() -> list[Request]:
    return [
        Request(prompt(200 + 20 * (number % 3), number), 40, joins=3 * number, leaves=7 if number % 4 == 1 else None)
        for number in range(9)
    ]


def test_who_joins_or_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests leave while their copies are under way and others get their memory; in the end all is replayed."""
    engine, executor, watched = streaming_requests(monkeypatch, gpu_kv_budget="1MiB", num_speculative_tokens=2)
    on_cpu = build("qwen3", torch.float32, 0, eos_token_id=None, head_dim=64)
    with engine:
        times = [ragged() for _ in range(3)]
        for requests in times:
            serve(engine, requests)
        assert "drain" not in watched.events
        assert any(key[0].in_flight < len(key[0].first) for key in executor._graphs), "cold rounds are captured too"
    with specstream.compile(on_cpu, None, max_model_len=1024) as alone:
        for request, *others in zip(*times, strict=True):
            out: Any = alone.generate([list(request.prompt)], max_new_tokens=40)
            expected = out[0, len(request.prompt) :].tolist()
            for one in (request, *others):
                assert one.tokens == expected[: len(one.tokens)]
                assert one.leaves is not None or len(one.tokens) == 40


@pytest.mark.parametrize("drafting", ["sequential", "cohorts", "lookahead"])
def test_who_joins_or_leaves_has_no_kernel_compiled(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [build("qwen3", torch.bfloat16, seed, eos_token_id=None, head_dim=64).to("cuda") for seed in (0, 1)]
    options: dict[str, Any] = {"max_model_len": 512, "chunk_tokens": 16, "max_num_seqs": 5, "gpu_kv_budget": "512KiB"}
    engine, _ = cuda_engine(models[0], models[1], compiled=True, drafting=drafting, **options)
    compiled = []
    compile_kernel = JITFunction._do_compile

    def noted(kernel: Any, *given: Any, **named: Any) -> Any:
        compiled.append(kernel.__name__)
        return compile_kernel(kernel, *given, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    with engine:
        lengths = [400, 30, 3, 100, 210, 5, 60]
        serve(engine, [Request(prompt(n, n), 20 + n % 30, joins=4 * i) for i, n in enumerate(lengths)])
        assert engine.metrics().streamed_bytes > 0
    assert not compiled


def test_an_interrupted_capture_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor, _ = streaming_requests(monkeypatch, gpu_kv_budget="min")
    steps = executor._capture_steps
    struck = 0

    def interrupted(*arguments: Any) -> None:
        nonlocal struck
        struck += 1
        if struck == 1:
            raise KeyboardInterrupt
        steps(*arguments)
        if struck == 2:
            raise KeyboardInterrupt

    with engine:
        expected: Any = engine.generate([list(prompt(100))], max_new_tokens=60)
        executor._graphs.clear()
        monkeypatch.setattr(executor, "_capture_steps", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.generate([list(prompt(100))], max_new_tokens=60)
        for _ in range(3):
            out: Any = engine.generate([list(prompt(100))], max_new_tokens=60)
            assert out.tolist() == expected.tolist()
        assert executor._graphs
