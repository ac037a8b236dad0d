"""Tuning on a device: engines come and go, their memory with them, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specstream import pinned
from tests.cuda_cases import cuda_engine, cuda_executor
from tests.helpers import prompt

AUTO: dict[str, Any] = dict.fromkeys(("chunk_tokens", "group_chunks", "staging_slots"), "auto")
MIB = 1 << 20
LONG = list(prompt(580))
"""Of 3 KiB a token, more than the budget has room for."""


@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafted"])
def test_tokens_and_memory(drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pinned_sizes, register = list[int](), pinned._register

    def noted(whole: torch.Tensor, *rest: Any) -> None:
        pinned_sizes.append(whole.nbytes)
        register(whole, *rest)

    monkeypatch.setattr(pinned, "_register", noted)
    changes = AUTO | {"debug": False, "gpu_kv_budget": "1536KiB"}
    if drafts:
        changes["num_speculative_tokens"] = "auto"
    with cuda_engine(torch.float32, drafts=drafts, **changes) as engine:
        before: Any = engine.generate([LONG], max_new_tokens=40)
        pinned_sizes.clear()
        found = engine.tune(context=512, batch=1, most_trials=5)
        assert found.best is not None
        # For one trial, perhaps for one with longer extents, and for the engine that goes on.
        assert 2 <= len(pinned_sizes) <= len(found.trials)
        assert all(trial.tokens_per_second for trial in found.trials), found
        after: Any = engine.generate([LONG], max_new_tokens=40)
        assert torch.equal(before, after)
        assert engine.metrics().streamed_bytes > 0
        assert cuda_executor(engine)._graphs
        taken = torch.cuda.memory_allocated()
        engine.tune(context=512, batch=1, most_trials=5)
        assert torch.cuda.memory_allocated() < taken + 16 * MIB
