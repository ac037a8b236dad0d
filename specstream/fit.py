"""`specstream.plan`: does it fit, how fast would it be? Without weights or the device, by what an engine plans with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from specstream.bound_by import bound_by
from specstream.depth import depths_of, expected_tokens
from specstream.errors import InvalidOption
from specstream.exposure import exposure
from specstream.fit_advice import better_ways, useless_draft, ways_out
from specstream.fit_arguments import Source, check_questions
from specstream.fit_models import OWN_NAMES, make_setup
from specstream.fit_report import FitReport, MemoryUse, RoundPrediction, Shortage
from specstream.fit_setup import NotAtOnce, Setup
from specstream.fit_shortage import enough_memory
from specstream.options import SELF, Options, Size
from specstream.policy import foreseen, turns, usual_round, verified_us
from specstream.round_plan import Lane, Plan


def plan(
    target: Source,
    draft: Source | None = None,
    *,
    context: int,
    batch: int = 1,
    device: str = "h200",
    acceptance: float | tuple[float, float] = 0.8,
    fit_gpu: Size | None = None,
    dtype: torch.dtype | None = None,
    max_context: bool = False,
    max_batch: bool = False,
    min_gpu: bool = False,
    **options: Any,
) -> FitReport:
    """Plans memory and rounds as an engine for these models would, and says what comes of it.

    Args:
        target, draft: names of presets, directories of checkpoints, or their config.json. A draft of "self" is the
            target itself; None: nothing drafts.
        context: tokens of a request, prompt and output.
        batch: requests that run at once.
        device: the name of a listed profile, or "auto": this machine's.
        acceptance: the chance that a candidate is right if those before it are, or a range of it.
        fit_gpu: device memory in place of the device's own, in bytes or text such as "24GiB".
        dtype: of the weights; None: of presets bfloat16, else the configuration's, on a CPU float32.
        max_context, max_batch, min_gpu: whether to find the longest context, the most requests, the smallest listed
            device that fit, all else being as given.
        options: further fields of `Options`.

    Raises:
        InvalidOption: an argument.
        UnsupportedModel: a model whose shapes cannot be told without its weights.
    """
    check_questions(max_context=max_context, max_batch=max_batch, min_gpu=min_gpu)
    setup, notes = make_setup(target, draft, context, batch, device, fit_gpu, dtype, options)
    rates = _acceptances(acceptance)
    report = _not_fitting(setup, rates) if setup.refusal() else _fitting(setup, rates)
    return replace(
        report,
        notes=notes,
        max_context=setup.max_context() if max_context else None,
        max_batch=setup.max_batch() if max_batch else None,
        min_gpu=(setup.min_gpu() or "none") if min_gpu else None,
    )


def _acceptances(acceptance: float | tuple[float, float]) -> tuple[float, ...]:
    given = acceptance if isinstance(acceptance, tuple) else (acceptance,)
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each <= 1 for each in given)
    if not numbers or not 1 <= len(given) <= 2 or given[0] > given[-1]:
        raise InvalidOption("acceptance", acceptance, "a number from 0 to 1, or a range (least, most) of such")
    return given


def _fitting(setup: Setup, acceptance: tuple[float, ...]) -> FitReport:
    planning = setup.planning
    settled = planning.settled(setup.options)
    try:
        _, rehearsal = setup.rehearsed(settled)
    except NotAtOnce:  # with the number of candidates that an engine would choose
        return _not_fitting(replace(setup, options=settled), acceptance)
    memory, planner = planning.planned(settled)
    spec = usual_round(settled, memory)
    if setup.draft is None:
        spec = replace(spec, draft_steps=0)
    plan = planner.exact(spec)
    drafts = exposure(plan, Lane.DRAFT)
    period, rounds, depth = drafts.timeline.period_us, turns(settled), settled.most_candidates
    looks_ahead = setup.draft is not None and settled.drafting == "lookahead"
    adapts = setup.draft is not None and setup.options.num_speculative_tokens == "auto"
    depths = depths_of(settled, memory, planner) if adapts else None

    def us_per_token(chance: float) -> float:
        """Of every request."""
        if setup.draft is None:
            return period
        if depths is None:
            return verified_us(settled, memory, planner, chance) / expected_tokens(chance, depth)
        best = depths.best(chance)
        return depths.periods_us[best] / expected_tokens(chance, best)

    advice = list(better_ways(memory, plan, drafts))
    if setup.draft is not None and (text := useless_draft(setup, settled, us_per_token(acceptance[0]), acceptance[0])):
        advice.append(text)
    prediction = RoundPrediction(
        round_ms=period / 1e3,
        rounds=rounds,
        link_floor_ms=spec.streamed_bytes / setup.profile.host_to_device_bytes_per_us / 1e3,
        streamed_bytes=spec.streamed_bytes,
        exposed_draft_ms=drafts.exposed_us / 1e3,
        hidden_draft_ms=drafts.hidden_us / 1e3,
        foreseen=tuple(foreseen(planner, spec, chance) for chance in acceptance) if looks_ahead else None,
        bound_by=bound_by(plan, drafts.timeline, setup.profile),
        tokens_per_second=tuple(setup.batch * 1e6 / us_per_token(chance) for chance in acceptance),
    )
    capacity, budget = setup.profile.device_memory_bytes, memory.host_budget if setup.host_is_known else None
    use = MemoryUse.of(memory, rehearsal.tail_blocks, rehearsal.host_bytes, capacity, budget)
    return _report(setup, settled, acceptance, None, use, prediction, plan, tuple(advice))


def _not_fitting(setup: Setup, acceptance: tuple[float, ...]) -> FitReport:
    enough = enough_memory(setup)
    use, short = (None, None) if enough is None else (enough.use(setup), enough.short)
    return _report(
        setup, setup.options, acceptance, setup.refusal(), use, None, None, tuple(ways_out(setup, enough)), short
    )


def _report(
    setup: Setup,
    options: Options,
    acceptance: tuple[float, ...],
    reason: str | None,
    memory: MemoryUse | None,
    prediction: RoundPrediction | None,
    plan: Plan | None,
    advice: tuple[str, ...],
    short: Shortage | None = None,
) -> FitReport:
    draft = None
    for name, own in OWN_NAMES.items():
        reason = reason and reason.replace(name, own)
    if setup.draft is not None:
        draft = SELF if setup.draft is setup.target else setup.draft.spec.name
    return FitReport(
        setup.target.spec.name,
        draft,
        setup.context,
        setup.batch,
        acceptance,
        setup.profile,
        options,
        reason,
        memory,
        short,
        prediction,
        plan,
        advice,
    )
