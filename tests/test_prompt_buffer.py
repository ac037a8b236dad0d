"""Prompts computed in large parts: how many rounds, what crosses the link, and the tokens of the target alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specstream.chunk_views import chunk_views, join_chunks, write_rows
from specstream.engine import Engine
from specstream.kv import ChunkLayout, DeviceStore, HostStore, SequenceKV
from specstream.memory import plan_memory
from specstream.options import Options
from specstream.round_spec import SeatSpec
from tests.helpers import Request, captured, cpu_executor, make_engine, model, prompt, reference, serve

NEW_TOKENS = 6
LAYERS = 3


@dataclass
class Copies:
    """Counts the copies to the host, which go through it."""

    engine: Engine
    to_host: list[int] = field(default_factory=list)
    """Chunks of each."""

    def __post_init__(self) -> None:
        cpu_executor(self.engine)._copy = self

    def __call__(self, destination: Tensor, source: Tensor) -> None:
        if destination.untyped_storage().data_ptr() != self.engine._executor.store.ring.untyped_storage().data_ptr():
            self.to_host.append(len(destination))
        destination.copy_(source)


def prompt_engine(extra_chunks: int = 0, **options: Any) -> tuple[Engine, Copies]:
    """An engine with the least device memory that its requests can run in together, and so many chunks more."""
    target = model("qwen3", layers=LAYERS)
    options = {"chunk_tokens": 4, "max_model_len": 128, "max_num_seqs": 1, "num_speculative_tokens": 2} | options
    least = plan_memory(Options(gpu_kv_budget="min", **options), captured(target).spec, weights=0)
    tails = (options["max_num_seqs"] - 1) * least.tail_slots
    budget = least.device_kv + (tails + extra_chunks) * least.layout.chunk_bytes
    ring: dict[str, Any] = {"staging_slots": 1, "group_chunks": 1}
    engine = make_engine(target, gpu_kv_budget=budget, debug=True, **ring | options)
    return engine, Copies(engine)


def assert_exact(*requests: Request) -> None:
    for request in requests:
        own = reference(model("qwen3", layers=LAYERS), request.prompt, NEW_TOKENS)
        assert request.tokens == own.tokens[: request.max_new_tokens]


@pytest.mark.parametrize("length", [96, 97, 99])
def test_a_prompt_that_fits_into_a_round_streams_nothing_and_is_written_out_once_a_layer(length: int) -> None:
    engine, copies = prompt_engine()
    with engine:
        request = Request(prompt(length), 1)
        serve(engine, [request])
        metrics = engine.metrics()
    assert metrics.num_rounds == 1
    assert metrics.streamed_bytes == 0
    assert copies.to_host == [24] * LAYERS
    assert_exact(request)


@pytest.mark.parametrize(("batched", "rounds"), [(16, 7), (32, 4), (30, 4), (50, 2)])
def test_a_longer_prompt_goes_in_parts_that_stream_what_is_before_them(batched: int, rounds: int) -> None:
    engine, copies = prompt_engine(max_num_batched_tokens=batched)
    with engine:
        request = Request(prompt(100), 1)
        serve(engine, [request])
        metrics = engine.metrics()
    assert metrics.num_rounds == rounds
    assert len(copies.to_host) == rounds * LAYERS
    assert sum(copies.to_host) == 25 * LAYERS
    block = engine.memory.layout.block_bytes
    assert metrics.streamed_bytes == sum(part * batched // 4 for part in range(rounds)) * block * LAYERS
    assert_exact(request)


def test_resident_chunks_are_not_written_out() -> None:
    engine, copies = prompt_engine(extra_chunks=7)
    with engine:
        request = Request(prompt(98), NEW_TOKENS)
        engine.submit(request.prompt, max_new_tokens=NEW_TOKENS)
        engine.step()
        (sequence,) = engine._scheduler.running
        assert sequence.kv is not None
        assert (sequence.kv.resident, sequence.kv.streamed) == (7, 24 - 7)
        assert copies.to_host == [24 - 7] * LAYERS


def test_requests_share_a_round_and_its_prompt_buffer() -> None:
    """The third does not fit into what the first two leave of the token budget, and goes in two parts."""
    engine, copies = prompt_engine(max_num_seqs=3, max_num_batched_tokens=90)
    with engine:
        requests = [Request(prompt(length), NEW_TOKENS) for length in (33, 35, 41)]
        serve(engine, requests)
    assert copies.to_host[: 4 * LAYERS] == [8, 8, 5] * LAYERS + [5] * LAYERS
    assert_exact(*requests)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 6)), min_size=1, max_size=4),
    st.fixed_dictionaries(
        {
            "chunk_tokens": st.integers(1, 9),
            "staging_slots": st.sampled_from([1, 2, 3]),
            "group_chunks": st.sampled_from([1, 3, "auto"]),
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.sampled_from([3, 11, 16, 37, 64, 2048]),
            "num_speculative_tokens": st.integers(1, 6),
        }
    ),
    st.integers(0, 12),
)
def test_tokens_are_exact_whatever_the_sizes(drawn: list[tuple[int, int]], options: dict[str, Any], extra: int) -> None:
    target = model("qwen3", layers=LAYERS)
    options = options | {"max_model_len": 100, "debug": True}
    least = plan_memory(Options(gpu_kv_budget="min", **options), captured(target).spec, weights=0)
    budget = least.device_kv + extra * least.layout.chunk_bytes
    requests = [Request(prompt(length), 3, joins=joins) for length, joins in drawn]
    with make_engine(target, target, **options, gpu_kv_budget=budget) as engine:
        serve(engine, requests)
    assert_exact(*requests)


@pytest.mark.parametrize("batched", [5, 7, 14, 2048])
@pytest.mark.parametrize("chunk", [2, 3, 5])
def test_a_part_of_a_prompt_can_be_tried_again(batched: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round fails once, at its end: what it has overwritten must not be needed again."""
    engine, _ = prompt_engine(chunk_tokens=chunk, max_num_batched_tokens=batched, max_num_seqs=2)
    accept = engine._speculator.accept
    failed: set[tuple[int, ...]] = set()

    def fail_first(rows: Any, logits: Tensor) -> None:
        key = tuple(row.kv.length for row in rows)
        if key not in failed:
            failed.add(key)
            raise RuntimeError("once")
        accept(rows, logits)

    monkeypatch.setattr(engine._speculator, "accept", fail_first)
    given: dict[int, list[int]] = {}
    lengths = (43, 17)
    with engine:
        numbers = [engine.submit(prompt(length), max_new_tokens=NEW_TOKENS) for length in lengths]
        while engine.has_unfinished:
            try:
                for output in engine.step():
                    given.setdefault(output.request_id, []).extend(output.new_token_ids)
            except RuntimeError:
                continue
    for number, length in zip(numbers, lengths, strict=True):
        assert given[number] == reference(model("qwen3", layers=LAYERS), prompt(length), NEW_TOKENS).tokens


# Its parts

LAYOUT = ChunkLayout(num_layers=2, num_kv_heads=2, head_dim=8, chunk_tokens=4, dtype=torch.float64)


@settings(max_examples=400)
@given(st.integers(0, 39), st.integers(1, 40), st.integers(0, 12), st.integers(0, 4), st.integers(3, 5))
def test_rows_that_a_round_takes_fit(length: int, wanted: int, free: int, resident: int, tail: int) -> None:
    kv = SequenceKV(LAYOUT, 80, resident, tail, [], HostStore(LAYOUT, 1 << 20, 20).reserve(20), length)
    kv.streamed = max(0, length // 4 - resident)
    rows = kv.prompt_rows(wanted, free)
    assert 0 <= rows <= wanted
    end = length + rows
    assert kv.buffered_after(end) <= free or rows == 0
    last, begun = end // 4, length % 4 > 0 and length // 4 >= resident
    if end % 4 and begun and last > length // 4:
        assert (last - length // 4) % tail, "the open chunk is overwritten"
    if rows < wanted and free > 1:
        assert end % 4 == 0, "it stops within a chunk"
        assert rows > 0


def test_a_request_that_is_all_resident_needs_no_buffer() -> None:
    kv = SequenceKV(LAYOUT, 40, 10, 3, [], None)
    assert kv.prompt_rows(37, 0) == 37
    assert kv.buffered_after(37) == 0


@given(st.integers(0, 3), st.integers(1, 30), st.data())
def test_rows_are_written_where_views_say_and_nowhere_else(offset: int, rows: int, data: st.DataObject) -> None:
    chunks = -(-(offset + rows) // 4) + 1
    blocks = data.draw(st.permutations(range(chunks + 2)))[:chunks]
    store = DeviceStore(LAYOUT, chunks + 2, 1, 1, torch.device("cpu"), debug=True)
    seat = SeatSpec(0, chunks, 3, 0, 0, 0, chunks)
    kv = SequenceKV(LAYOUT, 4 * chunks, chunks, 3, list(blocks), None)
    views = chunk_views(store, 1, seat, kv, range(chunks))
    key, value = torch.randn(2, rows, 2, 8, dtype=torch.float64).transpose(1, 2)
    write_rows(views, offset, key, value)
    joined = torch.stack(join_chunks(views))
    assert torch.equal(joined[:, :, offset : offset + rows], torch.stack([key, value]))
    assert int((~store.blocks.isnan()).sum()) == key.numel() + value.numel()


def test_neighbours_are_one_view() -> None:
    store = DeviceStore(LAYOUT, 8, 1, 1, torch.device("cpu"), prompt_chunks=9)
    kv = SequenceKV(LAYOUT, 99, 2, 3, [3, 4, 1, 6, 7], HostStore(LAYOUT, 1 << 20, 20).reserve(20))
    seat = SeatSpec(0, 2, 3, 0, 5, 0, 8, buffer_start=3)
    views = chunk_views(store, 1, seat, kv, range(8))
    assert [len(view) for view in views] == [2, 6]
    assert views[0].data_ptr() == store.blocks[1, 3].data_ptr()
    assert views[1].data_ptr() == store.prompt[1, 3].data_ptr()
    unbuffered = SeatSpec(0, 2, 3, 0, 0, 0, 5)
    assert [len(view) for view in chunk_views(store, 0, unbuffered, kv, range(5))] == [2, 1, 2]
