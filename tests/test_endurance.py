"""What an engine must not do in the long run: grow, leave threads behind, recompile."""

from __future__ import annotations

import gc
import threading

import psutil
from torch._dynamo.utils import counters

from specstream.engine import Engine
from tests.helpers import captured, make_engine, model, new_engine, prompt, step_to_end


def store_bytes(engine: Engine) -> tuple[int, int, int]:
    return engine._host.allocated_bytes, engine._host.used_bytes, len(engine._executor.store.free_blocks)


def test_memory_is_flat_over_two_hundred_requests() -> None:
    process = psutil.Process()
    with new_engine(debug=False, chunk_tokens=8) as engine:
        after_fifth: tuple[int, int, int] | None = None
        resident = 0
        for number in range(200):
            ids = prompt(20 + number % 5)
            engine.submit(ids, max_new_tokens=4)
            step_to_end(engine)
            if number == 4:
                after_fifth = store_bytes(engine)
            if number == 40:  # once the plans of all structures are kept
                gc.collect()
                resident = process.memory_info().rss
        assert store_bytes(engine) == after_fifth
        gc.collect()
        assert process.memory_info().rss - resident < 4 << 20
        assert not engine._speculator.drafter._seats  # type: ignore[union-attr]


def test_on_a_cpu_nothing_is_kept_from_the_collector() -> None:
    """And what a program has kept from it stays so."""
    with new_engine():
        assert gc.get_freeze_count() == 0
        gc.freeze()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_threads_end_with_their_engine() -> None:
    before = threading.active_count()
    for _ in range(10):
        with new_engine() as engine:
            assert threading.active_count() > before
            engine.generate([list(prompt(9))], max_new_tokens=3)
    assert threading.active_count() == before


def test_nothing_is_recompiled() -> None:
    target = model("qwen3")
    captured(target)
    before = {name: dict(values) for name, values in counters.items()}
    with make_engine(target, target, chunk_tokens=16, max_model_len=400, gpu_kv_budget="min") as engine:
        engine.generate([list(prompt(9))], max_new_tokens=300)
        for length in (1, 2, 17, 64, 100):
            engine.generate([list(prompt(length))], max_new_tokens=5)
    assert {name: dict(values) for name, values in counters.items()} == before


# Metrics
