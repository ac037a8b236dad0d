"""What `drafting="auto"` stands for, for Qwen3-8B and a draft of Qwen3-0.6B on an H200, by prediction."""

from __future__ import annotations

from typing import Any

import pytest

from specstream.idle import idle_bytes
from specstream.memory import MemoryPlan, plan_memory
from specstream.options import Options
from specstream.planner import Planner
from specstream.policy import choose_drafting
from specstream.profiles import CPU_PROFILE, H200
from specstream.round_work import NO_DRAFT
from tests.test_profiles import QWEN3_06B, qwen3_8b

GIB = 1 << 30


def chosen(profile: Any = H200, draft: Any = QWEN3_06B, free: int = 8 * GIB, **options: Any) -> str:
    defaults: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 4, "gpu_kv_budget": "1GiB"}
    model = qwen3_8b()

    def planned(given: Options) -> tuple[MemoryPlan, Planner]:
        idle = idle_bytes(given, profile, draft)
        memory = plan_memory(given, model.spec, weights=0, free_host=64 * GIB, free_device=free, idle_bytes=idle)
        return memory, Planner(model, profile, draft, given.most_candidates + 1)

    return choose_drafting(Options(**defaults | options), planned)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staging_slots": 2},
        {"num_speculative_tokens": 8, "gpu_kv_budget": "500MiB"},
        {"num_speculative_tokens": 8, "gpu_kv_budget": "2GiB", "max_model_len": 16_384},
    ],
)
def test_requests_take_turns_where_histories_stream(options: dict[str, Any]) -> None:
    """A ring that hides drafting has no room for chunks that need not be streamed."""
    assert chosen(**options) == "cohorts"


def test_drafts_come_after_acceptance_where_they_are_a_small_part_of_a_round() -> None:
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 16_384}
    assert chosen(num_speculative_tokens=1, **options) == "sequential"
    assert chosen(num_speculative_tokens=16, **options) == "cohorts"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"draft": NO_DRAFT},
        {"profile": CPU_PROFILE},
        {"gpu_kv_budget": "auto", "free": 64 * GIB},
    ],
)
def test_nothing_is_drafted_beside_the_target_where_that_gains_nothing(options: dict[str, Any]) -> None:
    """One request, no draft, a device that is the host, everything resident."""
    assert chosen(**{"staging_slots": 2} | options) == "sequential"
