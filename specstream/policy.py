"""When candidates are drafted: what `drafting="auto"` stands for on a device, for a model and a memory plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from specstream.memory import MemoryPlan
from specstream.planner import Planner
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.steady import steady_round

Policy = Literal["sequential", "cohorts"]

LEAST_GAIN = 1.02
"""By what factor cohorts must be predicted to be faster: each pass serves half as many requests."""


def choose_drafting(memory: MemoryPlan, planner: Planner, requests: int, depth: int) -> Policy:
    """The policy with which as many requests of `max_model_len` as there can be are predicted to be verified sooner.

    Where the ring holds what the link brings while the draft proposes, drafting after acceptance costs nothing, and
    cohorts gain nothing. They do where there is no room for such a ring. Nothing else is asked of a device that is the
    host: there drafts do not run beside the target.
    """
    beside = planner.profile.device_memory_bytes is not None
    if not beside or not planner.draft.layers or requests < 2 or not memory.streams:
        return "sequential"
    seats = _longest(memory, requests)
    half = seats[: (requests + 1) // 2]
    all_at_once = _period_us(planner, _round(memory, seats, depth))
    others = tuple(_moved(seat.on_host, len(half)) for seat in half)
    by_turns = _period_us(planner, replace(_round(memory, half, depth), drafts_beside=True, next_runs=others))
    return "cohorts" if all_at_once > LEAST_GAIN * 2 * by_turns else "sequential"


def _longest(memory: MemoryPlan, requests: int) -> tuple[SeatSpec, ...]:
    """Requests near `max_model_len` that share the device's blocks."""
    total = memory.layout.chunks_of(memory.max_model_len)
    resident = min(total, max(0, memory.num_blocks // requests - memory.tail_slots))
    streamed = max(0, total - resident - 1)
    open_chunk = min(resident + streamed, total - 1)
    return tuple(
        SeatSpec(seat, resident, memory.tail_slots, streamed, offload=0, open=open_chunk, span=1)
        for seat in range(requests)
    )


def _round(memory: MemoryPlan, seats: tuple[SeatSpec, ...], depth: int) -> RoundSpec:
    layout = memory.layout
    return RoundSpec(
        layout.num_layers, memory.staging_slots, memory.chunks_per_group, layout.block_bytes, seats, 0, depth
    )


def _moved(run: ChunkRun, seats: int) -> ChunkRun:
    return replace(run, seat=run.seat + seats)


def _period_us(planner: Planner, spec: RoundSpec) -> float:
    return steady_round(planner.plan(spec.warm().canonical())).period_us
