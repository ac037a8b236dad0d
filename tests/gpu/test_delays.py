"""vllm 45704, 47282 and 29608: lanes that are slow on purpose, so that no order is right by luck.

Whatever nobody may read is NaN (`debug=True`), and what makes a lane slow is a part of the graphs that are captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from specstream.chunk_views import chunk_views
from specstream.engine import Engine
from specstream.errors import InvalidDistribution
from specstream.kv import SequenceKV
from specstream.round_plan import Lane
from specstream.round_spec import PROMPT_SLOTS
from tests.cuda_cases import (
    DTYPES,
    assert_the_targets,
    cuda_engine,
    cuda_executor,
    make_deaf,
    sleep,
    slow_copies,
    slow_readers,
    slow_writers,
)
from tests.helpers import Request, prompt, serve

SLOW: dict[str, Callable[[pytest.MonkeyPatch, float], None]] = {
    "writers": slow_writers,
    "readers": slow_readers,
    "fetches": partial(slow_copies, to_device=True),
    "offloads": partial(slow_copies, to_device=False),
}
both = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def serve_two(engine: Engine, after_step: Callable[[], None] = lambda: None) -> list[Request]:
    requests = [Request(prompt(300), 100), Request(prompt(75, 1), 80, joins=3)]
    serve(engine, requests, after_step)
    return requests


@both
@pytest.mark.parametrize("slow", SLOW)
def test_no_token_depends_on_how_slow_a_lane_is(slow: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_engine(dtype) as engine:
        SLOW[slow](monkeypatch, 0.1)
        requests = serve_two(engine)
        assert bool(cuda_executor(engine)._graphs) == (dtype == torch.float32)
        assert engine.metrics().streamed_bytes > 0
    assert_the_targets(dtype, *requests)


@both
@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafting"])
def test_no_token_depends_on_which_lane_is_behind(drafts: bool, dtype: torch.dtype) -> None:
    """Between rounds some lanes are given a sleep, up to several rounds long."""
    chooser = random.Random(0)
    with cuda_engine(dtype, drafts) as engine:

        def delay() -> None:
            for stream in cuda_executor(engine)._streams.values():
                if chooser.random() < 0.4:
                    sleep(chooser.uniform(0, 15), stream)

        requests = serve_two(engine, delay)
    assert_the_targets(dtype, *requests)


def test_replays_wait_for_their_data_on_a_link_that_others_use() -> None:
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    destination = torch.empty_like(source, device="cuda")
    with cuda_engine(torch.float32) as engine:

        def occupy() -> None:
            with torch.cuda.stream(other):
                for _ in range(4):
                    destination.copy_(source, non_blocking=True)

        requests = serve_two(engine, occupy)
        assert cuda_executor(engine)._graphs
        torch.cuda.synchronize()
    assert_the_targets(torch.float32, *requests)


@pytest.mark.parametrize(
    ("lane", "slow"),
    [(Lane.STORE, "writers"), (Lane.LINK, "readers"), (Lane.TARGET, "fetches")],
    ids=["offload before write", "fetch before read", "read before fetch"],
)
def test_a_lane_that_does_not_wait_shows(lane: Lane, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart: with a lane that waits for nothing the same delays do change the tokens."""
    dtype = torch.float64
    with cuda_engine(dtype) as engine:
        make_deaf(engine, lane)
        SLOW[slow](monkeypatch, 20)
        request = Request(prompt(150), 20)
        try:
            serve(engine, [request])
        except InvalidDistribution:  # it met the NaN of what nobody may read
            return
    with pytest.raises(AssertionError, match="not"):
        assert_the_targets(dtype, request)


@both
def test_chunks_reach_the_host_as_they_were_written(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every round, of prompt and verifications, what was written out in it is what the device has."""
    length = 1500 if dtype == torch.float32 else 500
    options = {"max_model_len": 3072, "group_chunks": 16, "num_speculative_tokens": 7, "max_num_seqs": 1}
    rounds = compared = 0
    with cuda_engine(dtype, drafts=True, gpu_kv_budget="min", **options) as engine:
        slow_writers(monkeypatch, 0.3)
        engine.submit(prompt(length), max_new_tokens=length)
        on_host = 0
        while engine.has_unfinished:
            engine.step()
            rounds += 1
            torch.cuda.synchronize()
            for sequence in engine._scheduler.running:
                assert sequence.kv is not None
                compared += compare_new_chunks(engine, sequence.kv, on_host)
                on_host = sequence.kv.streamed
    print(f"\n{compared} chunks in {rounds} rounds")
    assert rounds >= length // 8
    assert compared >= 2 * length // 16 - 4


def compare_new_chunks(engine: Engine, kv: SequenceKV, before: int) -> int:
    """Host and device blocks of the chunks that the last round wrote out; returns how many those are.

    The prompt buffer still has the last layers' chunks.
    """
    assert engine._latest_spec is not None
    (seat,) = engine._latest_spec.seats
    layers = range(kv.layout.num_layers)
    for layer in layers if seat.buffer_start is None else layers[-PROMPT_SLOTS:]:
        for chunk in range(kv.resident + before, kv.resident + kv.streamed):
            (on_device,) = chunk_views(engine._executor.store, layer, seat, kv, [chunk])
            assert torch.equal(kv.host_view(layer, chunk, chunk + 1), on_device.cpu()), f"layer {layer} chunk {chunk}"
    return kv.streamed - before
