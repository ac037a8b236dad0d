"""Rounds whose attention the Triton kernels compute, in Triton's interpreter: the tokens of the target alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specstream.attention import LayerAttention
from specstream.attention_choice import KernelChoice
from specstream.engine import Engine
from specstream.kernels import tiling
from specstream.load_kernels import load_kernels
from tests.helpers import Request, cpu_executor, make_engine, model, prompt, reference, serve

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    monkeypatch.setattr(tiling, "MAX_SPLITS", 2)


def kernel_engine(name: str, **options: Any) -> tuple[Engine, list[bool]]:
    """An engine whose rounds use the kernels where they can; and for each round whether it did."""
    target = model(name, torch.float32, layers=2)
    engine = make_engine(target, target, debug=True, **{"max_model_len": 96} | options)
    store, used = engine._executor.store, []
    choice = KernelChoice(store, engine._planner.model.spec, store.num_blocks, LayerAttention(store))

    def choose(spec: Any, batch: Any) -> Any:
        kernels = choice.kernels(spec, batch)
        used.append(kernels is not None)
        return kernels or choice.for_prompts

    cpu_executor(engine)._choose_attention = choose
    return engine, used


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"gpu_kv_budget": "min", "chunk_tokens": 16, "num_speculative_tokens": 3}),
        ("qwen3", {"gpu_kv_budget": "auto", "chunk_tokens": 16, "num_speculative_tokens": 4}),
        ("llama3", {"gpu_kv_budget": "12KiB", "chunk_tokens": 4, "group_chunks": 3, "num_speculative_tokens": 6}),
    ],
)
def test_tokens_are_those_of_the_target_alone(name: str, options: dict[str, Any]) -> None:
    engine, used = kernel_engine(name, max_num_seqs=2, **options)
    with engine:
        requests = [Request(prompt(37), 7), Request(prompt(5), 9, joins=1), Request(prompt(60), 3, joins=2)]
        serve(engine, requests)
        metrics = engine.metrics()
    for request in requests:
        own = reference(engine_target(name), request.prompt, request.max_new_tokens)
        assert request.tokens == own.tokens, f"gaps {own.gaps}"
    assert sum(used) > len(used) / 2
    assert metrics.mean_acceptance_length > 2.5


def engine_target(name: str) -> torch.nn.Module:
    return model(name, torch.float32, layers=2)


def test_rounds_with_fewer_candidates_are_of_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a text there is room for few: nothing is to be compiled or captured for those rounds."""
    seen, counts, sizes = set(), set(), KernelChoice.sizes

    def noted(choice: KernelChoice, *given: Any) -> Any:
        seen.add(sizes(choice, *given))
        return sizes(choice, *given)

    monkeypatch.setattr(KernelChoice, "sizes", noted)
    engine, used = kernel_engine("qwen3", gpu_kv_budget="auto", chunk_tokens=16, num_speculative_tokens=6)
    with engine:
        run = engine._executor.run

        def counted(plan: Any, spec: Any, batch: Any) -> None:
            counts.add(len(batch.rows.tokens))
            run(plan, spec, batch)

        monkeypatch.setattr(engine._executor, "run", counted)
        engine.generate([list(prompt(7))], max_new_tokens=12)
    assert all(used)
    assert len(counts) > 1
    assert len(seen) == 1


def test_many_rows_are_left_to_the_library() -> None:
    target = engine_target("qwen3")
    engine, used = kernel_engine("qwen3", gpu_kv_budget="min", chunk_tokens=64, max_model_len=256)
    with engine:
        out: Any = engine.generate([list(prompt(150))], max_new_tokens=3)
    assert out[0, 150:].tolist() == reference(target, prompt(150), 3).tokens
    assert used[0] is False
    assert used[-1] is True


@pytest.mark.parametrize("window", [None, 8])
def test_the_drafter_of_a_device_proposes_what_the_cpus_does(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged catch-up, rejected candidates, and a window in whole blocks; without graphs, which need a device."""
    from specstream import block_window, cuda_draft
    from specstream.draft import Drafter, DraftWindow
    from tests.helpers import captured

    monkeypatch.setattr(block_window, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(block_window, "FEED_TOKENS", 8)
    graph = captured(engine_target("qwen3"))
    spans = DraftWindow(64, window, 4)
    host = Drafter(graph, spans, graph.spec.vocab_size, 2)
    device = cuda_draft.CudaDrafter(graph, spans, graph.spec.vocab_size, 2)
    text = {0: list(prompt(40)), 1: list(prompt(9))}
    for _ in range(3):
        drawn: list[dict[int, int]] = []
        for drafter in (host, device):
            logits = drafter.start({seat: list(tokens) for seat, tokens in text.items()})
            if window is None:
                drawn.append({seat: int(values.argmax()) for seat, values in logits.items()})
            else:
                assert all(values.isfinite().all() for values in logits.values())
            for step in range(2):
                logits = drafter.extend({0: 5 + step, 1: 9})
                if window is None:
                    drawn[-1] |= {10 * step + 2 + seat: int(v.argmax()) for seat, v in logits.items()}
        if window is None:
            assert drawn[0] == drawn[1]
        text = {seat: [*tokens, 5, 11] if seat == 0 else [*tokens, 9] for seat, tokens in text.items()}
    device.free(0)
    assert len(device.store.free_blocks) == device.blocks.blocks


def test_loading_kernels_leaves_the_store_as_it_is() -> None:
    engine, _ = kernel_engine("qwen3", gpu_kv_budget="min", chunk_tokens=16, num_speculative_tokens=3)
    with engine:
        store, model_ = cpu_executor(engine).store, cpu_executor(engine).model
        store.blocks.fill_(1.5)
        choice = KernelChoice(store, model_.spec, store.num_blocks, LayerAttention(store))
        load_kernels(model_, choice, [(1, 4), (3, 2)])
        assert (store.blocks == 1.5).all()
        assert not store.ring[0].isfinite().any()  # each launch has run: debug poisons what a group has left
        assert not choice._made
