"""When candidates are drafted: what `drafting="auto"` stands for on a device, for a model and a memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from specstream.errors import OutOfBudget
from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.planner import Planner
from specstream.rehearsal import rehearse
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
    chunks of the history on the device. But distributions of two groups take more, so that on a full device fewer
    requests may run at once. Nothing else than the former is asked of a device that is the host: there drafts do not
    run beside the target.
    """
    sequential = replace(options, drafting="sequential")
    memory, planner = planned(sequential)
    streams = bool(longest_round(memory, options.max_num_seqs, options.most_candidates).groups)
    beside = planner.profile.device_memory_bytes is not None
    if not beside or not planner.draft.layers or options.max_num_seqs < 2 or not streams:
        return "sequential"
    by_turns = replace(options, drafting="cohorts")
    try:
        at_once = rehearse(planned(by_turns)[0], options.max_num_seqs).running
    except OutOfBudget:
        return "sequential"
    if at_once < rehearse(memory, options.max_num_seqs).running:
        return "sequential"
    gain = verified_us(sequential, planned) / verified_us(by_turns, planned)
    return "cohorts" if gain > LEAST_GAIN else "sequential"


def verified_us(options: Options, planned: Planned) -> float:
    """How long verifying all requests once is predicted to take, by a policy that is settled."""
    memory, planner = planned(options)
    return turns(options) * period_us(planner, usual_round(options, memory))


def turns(options: Options) -> int:
    """Rounds in which every request verifies once."""
    return 2 if options.drafting == "cohorts" else 1


def usual_round(options: Options, memory: MemoryPlan) -> RoundSpec:
    """The round of as many requests of `max_model_len` as there can be, by a policy that is settled.

    With cohorts that of one of them; with lookahead, whose steps are one more than candidates, as if all that comes
    were foreseen.
    """
    round_of_all = longest_round(memory, options.max_num_seqs, options.most_candidates)
    if options.drafting == "lookahead":
        return replace(round_of_all, drafts_beside=True, draft_steps=options.most_candidates + 1)
    if options.drafting != "cohorts":
        return round_of_all
    half = round_of_all.seats[: (options.max_num_seqs + 1) // 2]
    others = tuple(replace(seat.on_host, seat=seat.seat + len(half)) for seat in half)
    return replace(memory.round_of(half, options.most_candidates), drafts_beside=True, next_runs=others).warm()


def longest_round(memory: MemoryPlan, requests: int, depth: int) -> RoundSpec:
    """A round of so many requests near `max_model_len`, which share the device's blocks."""
    share = memory.num_blocks // requests
    seats = tuple(memory.longest_seat(seat, share, empty_seats=1) for seat in range(requests))
    return memory.round_of(seats, depth).warm()


def period_us(planner: Planner, spec: RoundSpec) -> float:
    """How long rounds of this structure are predicted to take, one after the other."""
    return steady_round(planner.exact(spec)).period_us
