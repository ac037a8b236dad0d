"""Memory plans of a device of its own: what is free there is not exceeded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specstream import parts
from specstream.errors import OutOfBudget
from specstream.memory import MemoryPlan, plan_memory
from specstream.options import Options, format_size
from tests.test_memory import GIB, SPEC


def device_plan(free_device: int, draft_kv: int = 0, **options: Any) -> MemoryPlan:
    defaults: dict[str, Any] = {"max_model_len": 64, "chunk_tokens": 4, "num_speculative_tokens": 3, "max_num_seqs": 1}
    return plan_memory(
        Options(**defaults | options), SPEC, weights=11, draft_kv=draft_kv, free_host=GIB, free_device=free_device
    )


LEAST = 1024 + 3 * 3072
"""A slot of one chunk and a tail."""


def test_what_a_device_has_free_is_not_exceeded() -> None:
    assert device_plan(LEAST, gpu_kv_budget="min").device_kv == LEAST
    assert device_plan(LEAST + 5, 5, gpu_kv_budget="min").device_kv == LEAST
    assert device_plan(1 << 20, gpu_kv_budget="1GiB").device_kv < 1 << 20  # more than it could ever use
    with pytest.raises(OutOfBudget, match=r"The least that works is 10\.00 KiB\. Ways out: smaller"):
        device_plan(LEAST - 1, gpu_kv_budget="min")
    with pytest.raises(OutOfBudget, match=r"and the draft's KV 5 B; 10\.00 KiB are free .* a smaller draft_window"):
        device_plan(LEAST + 4, 5, gpu_kv_budget="auto")


def test_the_prompt_buffer_takes_no_more_than_is_left() -> None:
    for left, chunks in ((0, 1), (7 * 2048, 7), (100 * 2048, 16)):
        assert device_plan(LEAST + 5 + left, 5, gpu_kv_budget="min").prompt_chunks == chunks


def test_a_budget_beyond_what_a_device_has_free_is_refused_with_one_that_fits() -> None:
    free, draft_kv = 40_000, 1000
    with pytest.raises(OutOfBudget, match="a gpu_kv_budget of at most") as refused:
        device_plan(free, draft_kv, gpu_kv_budget="1MiB", max_model_len=4096)
    assert format_size(LEAST) in str(refused.value)
    plan = device_plan(free, draft_kv, gpu_kv_budget=free - draft_kv, max_model_len=4096)
    assert plan.device_kv + draft_kv <= free


@pytest.mark.parametrize(("cap", "expected"), [(1.0, 40 + 7), (0.5, 50 - 13), (0.1, 0)])
def test_free_memory_counts_what_torch_holds_unused_and_its_cap(
    cap: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"mem_get_info": (40, 100), "memory_reserved": 20, "memory_allocated": 13}
    for name, value in (figures | {"get_per_process_memory_fraction": cap}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert parts._free_on(torch.device("cuda", 0)) == expected
