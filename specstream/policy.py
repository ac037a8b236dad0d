"""When candidates are drafted: what `drafting="auto"` stands for on a device, for a model and a memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.planner import Planner
from specstream.round_spec import RoundSpec
from specstream.steady import steady_round

Policy = Literal["sequential", "cohorts"]
Planned = Callable[[Options], tuple[MemoryPlan, Planner]]
"""The memory plan and the planner for options whose policy and number of candidates are settled."""

LEAST_GAIN = 1.02
"""By what factor cohorts must be predicted to be faster: each pass serves half as many requests."""


def choose_drafting(options: Options, planned: Planned) -> Policy:
    """The policy with which as many requests of `max_model_len` as there can be are predicted to be verified sooner.

    Each has the memory plan that is made for it. Drafting after acceptance costs nothing where the ring holds what the
    link brings while the draft proposes; drafting beside the target needs no such ring, and what that leaves keeps
    chunks of the history on the device. Nothing else than the former is asked of a device that is the host: there
    drafts do not run beside the target.
    """
    requests = options.max_num_seqs
    memory, planner = planned(replace(options, drafting="sequential"))
    beside = planner.profile.device_memory_bytes is not None
    together = longest_round(memory, requests, options.most_candidates)
    if not beside or not planner.draft.layers or requests < 2 or not together.groups:
        return "sequential"
    memory, planner = planned(replace(options, drafting="cohorts"))
    seats = longest_round(memory, requests, options.most_candidates).seats
    half = seats[: (requests + 1) // 2]
    others = tuple(replace(seat.on_host, seat=seat.seat + len(half)) for seat in half)
    turn = replace(memory.round_of(half, options.most_candidates), drafts_beside=True, next_runs=others).warm()
    return "cohorts" if _period_us(planner, together) > LEAST_GAIN * 2 * _period_us(planner, turn) else "sequential"


def longest_round(memory: MemoryPlan, requests: int, depth: int) -> RoundSpec:
    """A round of so many requests near `max_model_len`, which share the device's blocks."""
    share = memory.num_blocks // requests
    seats = tuple(memory.longest_seat(seat, share, empty_seats=1) for seat in range(requests))
    return memory.round_of(seats, depth).warm()


def _period_us(planner: Planner, spec: RoundSpec) -> float:
    return steady_round(planner.exact(spec)).period_us
