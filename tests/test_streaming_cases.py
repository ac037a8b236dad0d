"""Public fault reports of offloading systems, as behaviour to get right."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from specstream.kv import SequenceKV
from tests.copies import NEW_TOKENS, Copies, assert_exact, running_kv
from tests.helpers import Request, captured, make_engine, model, prompt, serve

# vllm PR 54975: a refill of the ring lands in a slot that is still needed when counts do not divide.


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_ring_refills_where_counts_do_not_divide(layers: int, slots: int) -> None:
    target = model("llama", layers=layers)
    options: dict[str, Any] = {
        "chunk_tokens": 2,
        "staging_slots": slots,
        "group_chunks": 1,
        "num_speculative_tokens": 2,
    }
    seen: set[int] = set()
    with make_engine(target, max_model_len=64, gpu_kv_budget="min", max_num_seqs=1, debug=True, **options) as engine:
        assert engine.memory.staging_slots == slots
        requests = [Request(prompt(1 + 2 * chunks), 2) for chunks in (1, 4, 9)] + [Request(prompt(1), 20)]
        serve(engine, requests, lambda: seen.update(kv.streamed for kv in running_kv(engine)))
    assert seen >= set(range(1, 10))
    assert_exact(target, *requests)


# LMCache 2206: the last, partly filled chunk.


@pytest.mark.parametrize("chunk", [1, 2, 4, 7])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_partial_last_chunk_and_commits_across_borders(chunk: int, depth: int) -> None:
    target = model("qwen2")
    crossings = 0
    with make_engine(
        target,
        target,
        chunk_tokens=chunk,
        num_speculative_tokens=depth,
        max_model_len=96,
        gpu_kv_budget="min",
        debug=True,
    ) as engine:
        for length in sorted({3 * chunk, 3 * chunk + 1, 4 * chunk - 1}):
            request = Request(prompt(length), 20)
            lengths: list[int] = []

            def note(lengths: list[int] = lengths) -> None:
                lengths += [kv.length for kv in running_kv(engine)]

            serve(engine, [request], note)
            assert_exact(target, request)
            crossings += sum(b // chunk > a // chunk and b - a > 1 for a, b in pairwise(lengths))
    assert crossings > 0


# vllm PR 36052: the store's cursor counts unverified tokens.


@pytest.mark.parametrize("draft", ["none", "other", "itself", "windowed"])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_each_committed_token_is_offloaded_exactly_once(draft: str, chunk: int) -> None:
    target, copies = model("qwen3"), Copies()
    drafter = {"none": None, "other": model("llama", seed=1)}.get(draft, target)
    window: dict[str, Any] = {"draft_window": 4} if draft == "windowed" else {}
    engine = make_engine(
        target,
        drafter,
        chunk_tokens=chunk,
        num_speculative_tokens=4,
        max_model_len=64,
        max_num_batched_tokens=7,
        gpu_kv_budget="min",
        debug=True,
        **window,
    )
    with copies.watch(engine):
        engine.submit(prompt(17), max_new_tokens=NEW_TOKENS)
        while True:
            engine.step()
            if not engine.has_unfinished:
                break
            (sequence,) = engine._scheduler.running
            kv = sequence.kv
            assert kv is not None
            assert kv.length <= len(sequence.tokens)
            assert (kv.resident + kv.streamed) * chunk <= kv.length
            assert len(copies.host_blocks) == kv.streamed * kv.layout.num_layers
            assert set(copies.host_blocks.values()) <= {1}
            assert_host_holds_the_history(target, kv, sequence.tokens)
    assert len(copies.host_blocks) > 0
    assert set(copies.host_blocks.values()) == {1}


def assert_host_holds_the_history(target: nn.Module, kv: SequenceKV, tokens: list[int]) -> None:
    """Compares the chunks on the host with the cache of the model itself."""
    if not kv.streamed:
        return
    count = kv.streamed * kv.layout.chunk_tokens
    with torch.no_grad():
        cache = target(torch.tensor([tokens[:count]]), use_cache=True).past_key_values
    for layer in range(kv.layout.num_layers):
        blocks = kv.host_view(layer, kv.resident, kv.resident + kv.streamed)
        key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
        torch.testing.assert_close(key, cache.layers[layer].keys[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(value, cache.layers[layer].values[0], rtol=1e-9, atol=1e-9)


# vllm 53951: only bytes out are counted, never bytes in.


@pytest.mark.parametrize("slots", [1, 3])
def test_every_round_streams_the_whole_history_on_the_host(slots: int) -> None:
    target, copies = model("qwen3"), Copies()
    engine = make_engine(
        target,
        target,
        chunk_tokens=3,
        num_speculative_tokens=3,
        staging_slots=slots,
        group_chunks=2,
        max_model_len=64,
        max_num_batched_tokens=8,
        gpu_kv_budget="min",
    )
    rounds, streamed, fetched_at_most = 0, 0, 0
    per_token = captured(target).spec.num_layers * captured(target).spec.kv_bytes_per_token_layer
    with copies.watch(engine):
        engine.submit(prompt(20), max_new_tokens=NEW_TOKENS)
        while engine.has_unfinished:
            on_host = copies.offloaded  # of rounds before: nothing else is attended to from there
            before = engine.metrics().streamed_bytes
            engine.step()
            assert engine.metrics().streamed_bytes - before == on_host
            streamed += on_host
            rounds += 1
            in_flight = 2 * slots * 3 * per_token // 3  # groups of two chunks of one layer
            fetched_at_most = streamed + in_flight
            assert streamed <= engine.metrics().link_bytes + in_flight
        assert copies.offloaded % (3 * per_token) == 0
        engine._executor.drain()
        metrics = engine.metrics()
        assert metrics.link_bytes == copies.fetched
        assert streamed == metrics.streamed_bytes <= metrics.link_bytes <= fetched_at_most
        assert metrics.num_rounds == rounds


def test_streamed_bytes_are_layers_by_tokens_by_bytes_per_token_for_every_request() -> None:
    target = model("smollm")
    spec = captured(target).spec
    with make_engine(
        target, None, chunk_tokens=2, max_model_len=64, max_num_seqs=3, gpu_kv_budget="64KiB", debug=True
    ) as engine:
        requests = [Request(prompt(length), 12, joins=joins) for length, joins in ((5, 0), (16, 2), (23, 4))]
        tokens_before, bytes_before, most = 0, 0, 0

        def check() -> None:
            nonlocal tokens_before, bytes_before, most
            streamed = engine.metrics().streamed_bytes
            rounds_bytes, bytes_before = streamed - bytes_before, streamed
            assert rounds_bytes == tokens_before * spec.num_layers * spec.kv_bytes_per_token_layer
            tokens_before = sum(2 * kv.streamed for kv in running_kv(engine))
            most = max(most, len(running_kv(engine)))

        serve(engine, requests, check)
        assert most == 3
    assert_exact(target, *requests)


# aprender PR 2014: draft = target accepts 1 of K. Any figure but 100% is a fault in some KV.


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_draft_equal_to_the_target_is_always_right(depth: int) -> None:
    target, chunk = model("qwen3"), 4
    with make_engine(
        target,
        target,
        chunk_tokens=chunk,
        num_speculative_tokens=depth,
        max_model_len=40,
        gpu_kv_budget="min",
        debug=True,
    ) as engine:
        committed: set[int] = set()
        for length in range(1, 4 * chunk + 1):
            engine.submit(prompt(length), max_new_tokens=16)
            while engine.has_unfinished:
                engine.step()
                committed.update(kv.length for kv in running_kv(engine))
            metrics = engine.metrics()
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens
        assert metrics.num_draft_tokens >= 100
        assert metrics.draft_acceptance_rate == 1.0
        assert committed >= set(range(1, 4 * chunk + 1))


# TensorRT-LLM PR 16280: drafted tokens cross into a block that is not there yet.


@pytest.mark.parametrize(("chunk", "depth"), [(8, 3), (5, 2), (16, 7), (4, 6)])
def test_candidates_across_a_block_border(chunk: int, depth: int) -> None:
    target = model("qwen2")
    with make_engine(
        target,
        target,
        chunk_tokens=chunk,
        num_speculative_tokens=depth,
        max_model_len=48,
        gpu_kv_budget="min",
        debug=True,
    ) as engine:
        for before in range(min(2 * (depth + 1) + 1, 2 * chunk)):
            request = Request(prompt(2 * chunk - before), depth + 3)
            serve(engine, [request])
            assert_exact(target, request)
        assert engine.metrics().draft_acceptance_rate == 1.0
