"""Requests placed in the middle of their lives: as a prefill leaves them, and read as a whole; rounds over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specstream.bench_history import place_history
from specstream.engine import Engine
from specstream.errors import OutOfBudget
from specstream.kv import SequenceKV
from tests.helpers import make_engine, model, prompt

TOKENS = 4
"""Of a chunk."""
BUDGETS = {"none resident": "min", "some resident": "24KiB", "all resident": "1MiB"}


def engine_of(budget: str, **changes: Any) -> Engine:
    options: dict[str, Any] = {"chunk_tokens": TOKENS, "max_model_len": 64, "max_num_seqs": 1, "gpu_kv_budget": budget}
    return make_engine(model("qwen3"), **options | {"num_speculative_tokens": 3} | changes)


def kv_of(engine: Engine) -> SequenceKV:
    (sequence,) = engine._scheduler.running
    assert sequence.kv is not None
    return sequence.kv


def copy_history(source: Engine, destination: Engine) -> None:
    """Gives the one request of `destination` the tokens and the KV of that of `source`."""
    (ours,), (theirs,) = source._scheduler.running, destination._scheduler.running
    theirs.tokens = list(ours.tokens)
    kv = kv_of(source)
    destination._executor.store.blocks.copy_(source._executor.store.blocks)
    if kv.streamed:
        for layer in range(kv.layout.num_layers):
            span = layer, kv.resident, kv.resident + kv.streamed
            kv_of(destination).host_view(*span).copy_(kv.host_view(*span))


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("length", [3, 39, 40, 41])
def test_a_placed_request_is_as_a_prefill_leaves_it(budget: str, length: int) -> None:
    with engine_of(budget) as real, engine_of(budget) as placed:
        real.submit(prompt(length), max_new_tokens=12)
        while kv_of(real).length < length if real._scheduler.running else True:
            real.step()
        place_history(placed, length, max_new_tokens=12)
        for name in ("limit", "resident", "tail_slots", "blocks", "length", "streamed"):
            assert getattr(kv_of(placed), name) == getattr(kv_of(real), name), name
        copy_history(real, placed)
        outputs: list[list[int]] = []
        for engine in (real, placed):
            engine._executor.reset_counters()
            outputs.append([])
            while engine.has_unfinished:
                outputs[-1] += [token for step in engine.step() for token in step.new_token_ids]
        assert outputs[0] == outputs[1]
        assert len(outputs[0]) == 11
        assert real._executor.streamed_bytes == placed._executor.streamed_bytes


def logits_of(budget: str, change: str | None) -> Tensor:
    """The logits of a round after a placed history, one value of which was changed."""
    seen: list[Tensor] = []
    with engine_of(budget) as engine:
        place_history(engine, 41, max_new_tokens=12)
        kv, store = kv_of(engine), engine._executor.store
        open_block = kv.blocks[kv.resident + (41 // TOKENS - kv.resident) % kv.tail_slots]
        if change == "first on host":
            kv.host_view(0, kv.resident, kv.resident + 1)[0, 1, 0, 0, 0] += 1
        elif change == "last on host":
            kv.host_view(2, kv.resident, kv.resident + kv.streamed)[-1, 1, -1, -1, -1] += 1
        elif change == "resident":
            store.blocks[1, kv.blocks[0], 1, 0, 0, 0] += 1
        elif change == "tail":
            store.blocks[2, open_block, 1, 0, 0, 0] += 1
        elif change == "after the end":
            store.blocks[2, open_block, 1, 0, 2, 0] += 1
        engine._speculator.accept = lambda rows, logits: seen.append(logits.clone())  # type: ignore[method-assign]
        engine.step()
        streamed = kv.layout.num_layers * kv.streamed * kv.layout.block_bytes
        assert engine._executor.streamed_bytes == streamed
        assert (kv.resident + kv.streamed) * TOKENS == 40
        assert kv.resident > 0
        assert kv.streamed > 0
    return seen[0]


def test_a_decode_reads_all_of_a_placed_history_and_nothing_else() -> None:
    budget = BUDGETS["some resident"]
    plain = logits_of(budget, None)
    assert plain.isfinite().all()
    for change in ("first on host", "last on host", "resident", "tail"):
        assert not torch.equal(logits_of(budget, change), plain), change
    assert torch.equal(logits_of(budget, "after the end"), plain)


def test_a_history_that_finds_no_seat_is_refused_and_leaves_nothing() -> None:
    with engine_of("min") as engine:
        place_history(engine, 20, max_new_tokens=4)
        with pytest.raises(OutOfBudget, match="no seat"):
            place_history(engine, 20, max_new_tokens=4)
        assert len(engine._unfinished()) == 1
