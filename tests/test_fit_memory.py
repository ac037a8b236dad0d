"""What is planned of memory is what an engine allocates, by class, to the byte: tiny models on the CPU, by chance."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specstream.errors import OutOfBudget
from specstream.fit import plan
from tests.helpers import make_engine, model, prompt

SEEDS = range(50)
seen: Counter[str] = Counter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Any = model("qwen3")
    path = tmp_path_factory.mktemp("qwen3")
    made.config.save_pretrained(path)
    return path


def options_of(chosen: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "chunk_tokens": chosen.choice([1, 3, 4, 8]),
        "num_speculative_tokens": chosen.choice([1, 3, 4, 6, "auto"]),
        "gpu_kv_budget": chosen.choice(["20KiB", "64KiB", "150KiB", "1MiB"]),
        "host_kv_budget": chosen.choice(["200KiB", "1MiB"]),
        "max_num_batched_tokens": chosen.choice([8, 64, "auto"]),
        "draft_window": chosen.choice([None, 4, 16]),
    }
    if chosen.random() < 0.3:
        options["staging_slots"] = chosen.choice([1, 2, 3])
    if chosen.random() < 0.3:
        options["group_chunks"] = chosen.choice([1, 2, 5])
    return options


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_what_is_allocated(seed: int, folder: Path) -> None:
    chosen = random.Random(seed)
    options, context, batch = options_of(chosen), chosen.choice([16, 33, 64]), chosen.choice([1, 2, 3])
    draft = chosen.choice([None, folder])
    if draft is None:
        options.pop("draft_window")
    report = plan(folder, draft, context=context, batch=batch, device="cpu", dtype=torch.float64, **options)
    seen["fits" if report.fits else "does not"] += 1
    target, sizes = model("qwen3"), {"max_model_len": context, "max_num_seqs": batch}
    second = None if draft is None else model("qwen3", seed=1)
    if report.reason is not None and "run at once" not in report.reason:
        with pytest.raises(OutOfBudget) as refused:
            make_engine(target, second, **options | sizes)
        assert str(refused.value).partition(" ")[0] == report.reason.partition(" ")[0]
        return
    engine = make_engine(target, second, **options | sizes)
    with engine:
        for _ in range(batch):
            engine.submit(prompt(context - 8), max_new_tokens=8)
        engine.step()
        running = len(engine._scheduler.running)
        assert report.fits == (running == batch)
        if not report.fits:
            assert report.short is not None
            assert report.short.device or report.short.host
            return
        use, store, host, memory = report.memory, engine._executor.store, engine._host, engine.memory
        assert use is not None
        assert (use.weights, use.draft_weights) == (memory.weights, memory.draft_weights)
        assert use.ring == store.ring.nbytes
        assert use.prompt_buffer == store.prompt.nbytes
        assert use.workspace == memory.workspace == 0, "the device is the host"
        assert use.tails + use.resident == store.blocks.nbytes
        assert use.host == host.allocated_bytes
        kept = [sequence.kv for sequence in engine._scheduler.running if sequence.kv is not None]
        tails = sum(len(kv.blocks) - kv.resident for kv in kept if kv.host is not None)
        assert use.tails == tails * memory.layout.chunk_bytes
        assert use.draft_kv == memory.draft_kv
        drafter = engine._speculator.drafter
        while drafter is not None and engine.has_unfinished:
            if len(drafter._kv) == batch:
                seen["drafts for all"] += 1
                assert use.draft_kv == sum(kv.nbytes for kv in drafter._kv.values())
            engine.step()


def test_both_ways_were_tried() -> None:
    if seen["fits"] + seen["does not"] == len(SEEDS):
        assert seen["fits"] > 10
        assert seen["does not"] >= 3
        assert seen["drafts for all"] > 5
