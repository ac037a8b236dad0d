"""When candidates are drafted: what `drafting="auto"` stands for on a device, for a model and a memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from specstream.errors import OutOfBudget
from specstream.fan_out import expected_hit_rate
from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.planner import Planner
from specstream.rehearsal import rehearse
from specstream.round_graph import TaskKind
from specstream.round_spec import RoundSpec
from specstream.speculate import ASSUMED_ACCEPTANCE
from specstream.steady import steady_round

Policy = Literal["sequential", "cohorts", "lookahead"]
Planned = Callable[[Options], tuple[MemoryPlan, Planner]]
"""The memory plan and the planner for options whose policy and number of candidates are settled."""

LEAST_GAIN = 1.02
"""By what factor drafting beside the target must be predicted to be faster: with cohorts each pass serves half as many
requests, with lookahead each step many more rows."""
BESIDE_GAP_US = 4500
"""In a round beside whose target candidates are drafted: what passes before the first step, while the host launches the
target and tells the device about branches, and after the last one. On an H200 4 to 5 ms."""


def choose_drafting(options: Options, planned: Planned) -> tuple[Policy, float]:
    """The policy with which as many requests of `max_model_len` as there can be are predicted to be verified sooner,
    and how many microseconds that takes.

    Each has the memory plan that is made for it. Drafting after acceptance costs nothing where the ring holds what the
    link brings while the draft proposes; drafting beside the target, of several requests by turns and of one for what
    may come, needs no such ring, and what that leaves keeps chunks of the history on the device. But distributions of
    two groups and branches take more, so that on a full device fewer requests may run at once. Nothing else than the
    former is asked of a device that is the host: there drafts do not run beside the target.
    """
    sequential = replace(options, drafting="sequential")
    memory, planner = planned(sequential)
    took = verified_us(sequential, memory, planner)
    streams = bool(longest_round(memory, options.max_num_seqs, options.most_candidates).groups)
    if planner.profile.device_memory_bytes is None or not planner.draft.layers or not streams:
        return "sequential", took
    policy: Policy = "cohorts" if options.max_num_seqs > 1 else "lookahead"
    beside = replace(options, drafting=policy)
    try:
        its_memory, its_planner = planned(beside)
        at_once = rehearse(its_memory, options.max_num_seqs).running
    except OutOfBudget:
        return "sequential", took
    if at_once < rehearse(memory, options.max_num_seqs).running:
        return "sequential", took
    would_take = verified_us(beside, its_memory, its_planner)
    return (policy, would_take) if took > LEAST_GAIN * would_take else ("sequential", took)


def verified_us(
    options: Options, memory: MemoryPlan, planner: Planner, acceptance: float = ASSUMED_ACCEPTANCE
) -> float:
    """How long verifying all requests once is predicted to take on average, by a policy that is settled."""
    spec = usual_round(options, memory)
    missed = 1 - foreseen(planner, spec, acceptance) if options.drafting == "lookahead" else 0.0
    return turns(options) * mean_round_us(planner, spec, missed)


def mean_round_us(planner: Planner, spec: RoundSpec, missed: float = 0.0) -> float:
    """How long rounds of this structure are predicted to take on average.

    Args:
        missed: with lookahead, how often an outcome has no branch, so that drafting follows.
    """
    plan = planner.exact(spec)
    period = steady_round(plan).period_us
    if spec.drafts_beside and planner.profile.device_memory_bytes is not None:
        drafts = plan.by_kind[TaskKind.DRAFT]
        period = max(period, sum((task.cost_us for task in drafts), BESIDE_GAP_US if drafts else 0.0))
    if missed and spec.drafts_beside:
        period += missed * late_us(planner, spec)
    return period


def late_us(planner: Planner, spec: RoundSpec) -> float:
    """With lookahead: how much longer a round is predicted to take if its outcome has no branch, so that drafting
    follows."""
    after, without = (replace(spec, drafts_beside=False, draft_steps=steps) for steps in (spec.draft_steps, 0))
    return period_us(planner, after) - period_us(planner, without)


def foreseen(planner: Planner, spec: RoundSpec, acceptance: float) -> float:
    """With lookahead: the chance that there is a branch for what becomes of each request of a round."""
    assert planner.draft.fan_out is not None
    requests, depth = len(spec.seats), spec.draft_steps - 1
    return expected_hit_rate(acceptance, depth, planner.draft.fan_out.of_each(requests)) ** requests


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
