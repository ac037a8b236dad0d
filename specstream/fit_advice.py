"""What to change: single changes that make it fit, and when streaming or drafting is the wrong tool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil

from specstream.exposure import Exposure
from specstream.fit_setup import Setup
from specstream.fit_shortage import Enough
from specstream.memory import MAX_AUTO_CHUNK, MemoryPlan, host_budget
from specstream.options import SELF_WINDOW, Options, format_size, parse_size
from specstream.policy import period_us, usual_round
from specstream.round_plan import Plan
from specstream.why_exposed import why_exposed

LEAST_USEFUL = 256
"""Tokens: a context that is shorter is no way out."""


def ways_out(setup: Setup, enough: Enough | None) -> Iterator[str]:
    """Single changes that make it fit; `enough` is what would, of memory."""
    context, batch = setup.max_context(), setup.max_batch()
    if LEAST_USEFUL <= context < setup.context:
        yield f"a context of {context} tokens fits"
    if 0 < batch < setup.batch:
        yield f"a batch of {batch} fits"
    if setup.draft is not None and setup.options.draft_window in (None, "auto"):
        if _fits(setup, draft_window=SELF_WINDOW):
            yield f"draft_window={SELF_WINDOW} fits"
        elif setup.draft is not setup.target:
            alone = replace(setup, draft=None, options=setup.options.without_draft)
            if alone.refusal() is None:
                yield "it fits without a draft"
    if setup.options.most_candidates > 1 and _fits(setup, num_speculative_tokens=1):
        yield "num_speculative_tokens=1 fits"
    if setup.options.gpu_kv_budget != "auto" and _fits(setup, gpu_kv_budget="auto"):
        yield 'gpu_kv_budget="auto" fits'
    if enough is not None and enough.short.of_budget and not enough.short.host:
        budget = _mebibytes(parse_size("gpu_kv_budget", enough.setup.options.gpu_kv_budget))
        if _fits(setup, gpu_kv_budget=budget):
            yield f'gpu_kv_budget="{budget}" fits'
    if enough is not None and not enough.short.device:
        yield from _larger_host(enough.setup)
    given = setup.options.chunk_tokens
    halves = (MAX_AUTO_CHUNK >> power for power in range(MAX_AUTO_CHUNK.bit_length()))
    smaller = (tokens for tokens in halves if tokens < (given if isinstance(given, int) else MAX_AUTO_CHUNK))
    chunk = next((tokens for tokens in smaller if _fits(setup, chunk_tokens=tokens)), None)
    if chunk is not None:
        yield f"chunk_tokens={chunk} fits"
    larger = setup.min_gpu()
    if larger is not None:
        yield f"it fits on {larger}"


def _fits(setup: Setup, **changes: Any) -> bool:
    return setup.changed(**changes).refusal() is None


def _larger_host(enough: Setup) -> Iterator[str]:
    """The host memory with which it fits, unless this machine does not have it."""
    size = host_budget(enough.options)
    if not enough.here or size <= psutil.virtual_memory().available:
        yield f'host_kv_budget="{_mebibytes(size)}" fits'


def _mebibytes(size: int) -> str:
    """A size as an option takes it, rounded up."""
    return f"{-(-size // (1 << 20))}MiB"


def better_ways(memory: MemoryPlan, plan: Plan, drafts: Exposure) -> Iterator[str]:
    """Where it fits: whether streaming and drafting pay."""
    if plan.spec.groups and memory.full_kv <= memory.device_kv:  # what fetches it whole needs no ring
        yield (
            f"each request ({format_size(memory.full_kv)} of KV) fits on the device alone: fetching it whole and "
            "rotating requests gives more throughput than streaming all of them in every round"
        )
    if plan.spec.draft_steps:
        reason = why_exposed(plan, drafts)
        if reason is not None:
            yield f"drafting takes {drafts.exposed_us / 1e3:.2f} ms of a round: {reason.value}"


def useless_draft(setup: Setup, settled: Options, us_per_token: float, acceptance: float) -> str | None:
    """That drafting does not pay at an acceptance, if without it a token of every request is predicted to take no
    longer."""
    alone = replace(setup, draft=None, options=settled.without_draft)
    memory, planner = alone.planning.planned(alone.options)
    period = period_us(planner, replace(usual_round(alone.options, memory), draft_steps=0))
    if period > us_per_token:
        return None
    return (
        f"without a draft a token takes {period / 1e3:.2f} ms, no longer than with it at an acceptance of "
        f"{acceptance:g}: drafting does not pay then"
    )
