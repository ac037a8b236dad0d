"""A ring that holds what the link brings while no round is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specstream.graph import AttentionSpec, ModelSpec
from specstream.idle import HOST_GAP_US, idle_bytes
from specstream.memory import MemoryPlan, plan_memory
from specstream.options import Options
from specstream.profiles import H200
from specstream.ring import Fill, longer_ring
from specstream.round_work import NO_DRAFT, DraftWork

MIB, GIB = 1 << 20, 1 << 30
QWEN3_06B = DraftWork(1_191_000_000, 28)
ATTENTIONS = tuple(AttentionSpec(layer, "", 32, 8, 128, 1.0) for layer in range(36))
SPEC = ModelSpec("qwen3-8b", 151_936, torch.bfloat16, torch.device("meta"), None, ATTENTIONS)
IDLE = 300 * MIB
FULL = Fill(2 * MIB, 32, 64)
"""Two groups of 64 MiB."""


@pytest.mark.parametrize(
    ("idle", "most", "slots"),
    [(0, GIB, 4), (192 * MIB, GIB, 4), (193 * MIB, GIB, 6), (IDLE, GIB, 6), (700 * MIB, GIB, 12), (GIB, GIB, 12)],
)
def test_a_ring_is_as_long_as_needed_where_its_slots_divide_the_layers(idle: int, most: int, slots: int) -> None:
    assert longer_ring(36, 4, FULL, idle, most) == slots


def test_a_ring_is_no_longer_than_a_slot_a_layer_or_than_it_may_be() -> None:
    small = Fill(MIB, 1, 1)
    assert longer_ring(36, 4, small, GIB, GIB) == 36
    assert longer_ring(36, 4, FULL, GIB, 8 * 64 * MIB) == 6
    assert longer_ring(36, 4, FULL, GIB, MIB) == 4
    assert longer_ring(31, 4, small, 20 * MIB, GIB) == 31  # a prime number of layers


@pytest.mark.parametrize(("streamed", "slots"), [(64, 6), (33, 9), (16, 9), (8, 18), (0, 4)])
def test_slots_that_are_not_full_hold_less(streamed: int, slots: int) -> None:
    assert longer_ring(36, 4, Fill(2 * MIB, 32, streamed), 250 * MIB, 4 * GIB) == slots


def test_the_link_goes_on_through_draft_steps_after_acceptance_alone() -> None:
    gap = int(HOST_GAP_US * H200.host_to_device_bytes_per_us)
    assert idle_bytes(Options(), H200, NO_DRAFT) == gap
    assert idle_bytes(Options(drafting="cohorts"), H200, QWEN3_06B) == gap
    four, eight = (idle_bytes(Options(num_speculative_tokens=depth), H200, QWEN3_06B) for depth in (4, 8))
    assert eight - four == pytest.approx(four - gap, abs=1)
    assert four / H200.host_to_device_bytes_per_us == pytest.approx(500 + 4 * 1242, rel=0.05)


def device_plan(idle: int, free: int = 8 * GIB, **options: Any) -> MemoryPlan:
    defaults: dict[str, Any] = {"max_model_len": 32_768, "max_num_seqs": 4, "gpu_kv_budget": "2GiB"}
    given = Options(**defaults | options)
    return plan_memory(given, SPEC, weights=0, free_host=64 * GIB, free_device=free, idle_bytes=idle)


def test_the_plan_of_a_device_has_such_a_ring_where_histories_stream() -> None:
    assert [device_plan(idle).staging_slots for idle in (0, IDLE)] == [4, 6]
    assert device_plan(IDLE).ring == 6 * 64 * MIB
    assert device_plan(IDLE, gpu_kv_budget="auto").staging_slots == 9, "more is resident, and groups are smaller"


def test_what_was_asked_for_and_what_never_streams_is_left_as_it_is() -> None:
    assert device_plan(IDLE, staging_slots=5).staging_slots == 5
    resident = device_plan(IDLE, free=64 * GIB, gpu_kv_budget="auto")
    assert not resident.streams
    assert resident.staging_slots == 4
    small = device_plan(IDLE, gpu_kv_budget="500MiB", max_num_seqs=1)
    assert small.staging_slots == 4, "no more than half of the budget"
