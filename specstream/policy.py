"""When candidates are drafted: what `drafting="auto"` stands for on a device, for a model and a memory plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from specstream.memory import MemoryPlan
from specstream.planner import Planner
from specstream.round_spec import RoundSpec
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
    together = longest_round(memory, requests, depth)
    if not beside or not planner.draft.layers or requests < 2 or not together.groups:
        return "sequential"
    half = together.seats[: (requests + 1) // 2]
    others = tuple(replace(seat.on_host, seat=seat.seat + len(half)) for seat in half)
    all_at_once = _period_us(planner, together)
    by_turns = _period_us(planner, replace(together, seats=half, drafts_beside=True, next_runs=others).warm())
    return "cohorts" if all_at_once > LEAST_GAIN * 2 * by_turns else "sequential"


def longest_round(memory: MemoryPlan, requests: int, depth: int) -> RoundSpec:
    """A round of so many requests near `max_model_len`, which share the device's blocks."""
    share = memory.num_blocks // requests
    seats = tuple(memory.longest_seat(seat, share, empty_seats=1) for seat in range(requests))
    return memory.round_of(seats, depth).warm()


def _period_us(planner: Planner, spec: RoundSpec) -> float:
    return steady_round(planner.exact(spec)).period_us
