"""What `drafting="auto"` stands for, for Qwen3-8B and a draft of Qwen3-0.6B on an H200, by prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specstream.fan_out import SECOND_MODEL, expected_hit_rate
from specstream.idle import idle_bytes
from specstream.memory import MemoryPlan, plan_memory
from specstream.options import Options
from specstream.planner import Planner
from specstream.policy import Planned, choose_drafting, period_us, usual_round, verified_us
from specstream.profiles import CPU_PROFILE, H200
from specstream.round_work import NO_DRAFT
from tests.test_profiles import QWEN3_06B, qwen3_8b

GIB = 1 << 30


WINDOW_KV = 1024 * 28 * 4096
"""Bytes of keys and values of 1,024 tokens of Qwen3-0.6B."""


def plans(profile: Any = H200, draft: Any = QWEN3_06B, free: int = 8 * GIB) -> Planned:
    model = qwen3_8b()

    def planned(given: Options) -> tuple[MemoryPlan, Planner]:
        idle = idle_bytes(given, profile, draft)
        memory = plan_memory(given, model.spec, weights=0, free_host=64 * GIB, free_device=free, idle_bytes=idle)
        work = replace(draft, fan_out=SECOND_MODEL) if given.drafting == "lookahead" else draft
        return memory, Planner(model, profile, work, given.most_candidates + 1)

    return planned


def chosen(profile: Any = H200, draft: Any = QWEN3_06B, free: int = 8 * GIB, **options: Any) -> str:
    defaults: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 4, "gpu_kv_budget": "1GiB"}
    return choose_drafting(Options(**defaults | options), plans(profile, draft, free))[0]


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
        {"max_num_seqs": 1, "draft": replace(QWEN3_06B, kv_bytes=16 * WINDOW_KV)},
        {"max_num_seqs": 1, "profile": CPU_PROFILE},
        {"draft": NO_DRAFT},
        {"profile": CPU_PROFILE},
        {"gpu_kv_budget": "auto", "free": 64 * GIB},
    ],
)
def test_nothing_is_drafted_beside_the_target_where_that_gains_nothing(options: dict[str, Any]) -> None:
    """Branches whose keys take long to read, no draft, a device that is the host, everything resident."""
    assert chosen(**{"staging_slots": 2} | options) == "sequential"


def test_one_request_is_looked_ahead_for_where_no_ring_hides_drafting() -> None:
    """Where the ring does, there is nothing to gain: each step of all branches takes longer."""
    options: dict[str, Any] = {"max_num_seqs": 1, "draft": replace(QWEN3_06B, kv_bytes=WINDOW_KV)}
    options |= {"max_model_len": 32_768, "num_speculative_tokens": 12}
    assert chosen(gpu_kv_budget="2GiB", **options) == "lookahead"
    assert chosen(gpu_kv_budget="2GiB", **options | {"num_speculative_tokens": 1}) == "sequential"


def test_outcomes_that_nothing_was_drafted_for_cost_the_steps_that_follow() -> None:
    given = Options(max_model_len=32_768, max_num_seqs=1, gpu_kv_budget="1GiB", drafting="lookahead")
    memory, planner = plans(draft=replace(QWEN3_06B, kv_bytes=WINDOW_KV))(given)
    spec = usual_round(given, memory)
    assert spec.draft_steps == given.most_candidates + 1
    foreseen, late = (period_us(planner, replace(spec, drafts_beside=beside)) for beside in (True, False))
    assert late > foreseen
    for acceptance in (0.5, 0.8):
        missed = 1 - expected_hit_rate(acceptance, given.most_candidates, SECOND_MODEL)
        mean = verified_us(given, memory, planner, acceptance)
        assert mean == pytest.approx(foreseen + missed * (late - foreseen), rel=1e-3)
    assert missed > 0.1


def test_drafting_beside_the_target_cannot_be_faster_than_its_steps() -> None:
    given = Options(max_model_len=8192, max_num_seqs=2, gpu_kv_budget="1GiB", drafting="cohorts")
    slow = replace(QWEN3_06B, read_bytes=100 * QWEN3_06B.read_bytes)
    memory, planner = plans(draft=slow)(given)
    steps = given.most_candidates * slow.bytes_of(1) / H200.memory_bytes_per_us
    assert verified_us(given, memory, planner) > 2 * steps
