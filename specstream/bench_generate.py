"""`specstream bench generate`: decoding as a user drives it, request by request and step by step.

Prompts are random tokens. With --skip-prefill a random history stands in for what their prefill would leave.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from specstream import api
from specstream.bench_history import place_history
from specstream.bench_machine import (
    cap_memory,
    choose_device,
    machine,
    peak_memory,
    reset_peak_memory,
    versions,
)
from specstream.bench_report import Progress, link_use, memory_rows, milliseconds, predicted, prediction, report
from specstream.bench_setup import (
    BenchModel,
    BenchModels,
    bench_model,
    given_options,
    memory_figures,
    memory_options,
    named_as_typed,
)
from specstream.cli import UsageError, chosen_options, traced
from specstream.engine import Engine
from specstream.options import SELF, format_size
from specstream.rates import link_bandwidth
from specstream.round_spec import RoundSpec


@dataclass(frozen=True)
class DecodeStep:
    """One step of the engine in which no prompt was computed."""

    seconds: float
    tokens: int
    """Produced, of all requests."""
    verified: int
    """Requests that it verified."""
    accepted: int
    """Candidates, of all requests."""
    streamed_bytes: int
    draft_seconds: float | None
    """That its draft steps took; None if the executor does not say."""
    spec: RoundSpec
    """Its structure."""


def run(given: argparse.Namespace) -> int:
    """The command."""
    with named_as_typed():
        figures = measure(given, Progress(), BenchModels())
    title = f"{given.target}, draft {given.draft}, {given.batch} x {given.context} tokens"
    report(title, table_rows(figures), figures, given.json)
    return 0


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """The options of `specstream.compile` that the command's own stand for, with those given beside them."""
    given.num_speculative_tokens = given.depth  # what is chosen is judged by it
    synthetic = ("synthetic_acceptance_rate", "synthetic_acceptance_length")
    if any(hasattr(given, name) for name in synthetic):
        given.rejection_sample_method = "synthetic"
    return chosen_options(given) | {"max_model_len": given.context, "max_num_seqs": given.batch}


def measure(given: argparse.Namespace, progress: Progress, models: BenchModels) -> dict[str, Any]:
    """Builds an engine, decodes every request to its end and returns the figures."""
    options = engine_options(given)
    prompt = given.context - given.new_tokens
    if prompt < 1:
        raise UsageError(f"--context {given.context} leaves no prompt before --new-tokens {given.new_tokens}")
    device, dtype = choose_device(given.device), getattr(torch, given.dtype)
    cap_memory(device, given.memory_cap)
    with progress.working("measuring the link"):
        link = link_bandwidth(device)
    reset_peak_memory(device)
    started = time.perf_counter()
    with progress.working(f"making and capturing {given.target} and draft {given.draft}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "acceptance is made up")  # the report says so
        target = models.target(given.target, given.context, dtype, device)
        draft = chosen_draft(given, target, dtype, device)
        options = memory_options(target, options, given.resident, draft)
        if draft is None:
            engine = models.engine(target, options)
        else:
            itself = draft.module is target.module
            engine = api.compile(target.module, SELF if itself else draft.module, **options)
    with closing(engine), traced(engine, given):
        with progress.working(f"{'filling' if given.skip_prefill else 'making'} prompts of {prompt} tokens"):
            start_requests(engine, given.batch, prompt, given.new_tokens, given.skip_prefill, sampling(given))
        setup_seconds, setup_peak = time.perf_counter() - started, peak_memory(device)
        reset_peak_memory(device)
        with progress.working(f"decoding {given.batch} x {given.new_tokens} tokens"):
            steps = decode(engine)
        counted = steps[given.warmup :]
        if not counted:
            raise UsageError(
                f"--warmup {given.warmup} leaves none of the {len(steps)} decode rounds to count; lower it, or raise "
                "--new-tokens"
            )
        return {
            "benchmark": "generate",
            "machine": machine(device),
            "versions": versions(),
            "options": given_options(given),
            "target": target.figures(),
            "draft": draft.figures() if draft else None,
            "synthetic": engine.options.rejection_sample_method == "synthetic",
            "setup_seconds": setup_seconds,
            "num_speculative_tokens": engine.options.most_candidates if draft else 0,
            "drafting": engine.options.drafting,
            "lookahead_hit_rate": engine.metrics().lookahead_hit_rate,
            **memory_figures(engine),
            "link_bytes_per_second": link,
            "prefill_seconds": None if given.skip_prefill else engine.metrics().prefill_seconds,
            **summarise(counted, engine.options.most_candidates if draft else 0, link),
            **prediction(engine._planner, Counter(step.spec for step in counted).most_common(1)[0][0], missed(engine)),
            "setup_peak_device_bytes": setup_peak,
            "peak_device_bytes": peak_memory(device),
        }


def missed(engine: Engine) -> float:
    """With lookahead: the share of outcomes that nothing was drafted for."""
    return 1 - engine.metrics().lookahead_hit_rate if engine.options.drafting == "lookahead" else 0.0


def chosen_draft(
    given: argparse.Namespace, target: BenchModel, dtype: torch.dtype, device: torch.device
) -> BenchModel | None:
    """What drafts; None if nothing does."""
    if given.draft == SELF:
        return replace(target, name=SELF)
    if given.draft.lower() == "none":
        return None
    return bench_model(given.draft, given.context, dtype, device, seed=1)


def sampling(given: argparse.Namespace) -> GenerationConfig | None:
    """How the requests choose their tokens; None: greedily."""
    chosen = {name: getattr(given, name) for name in ("temperature", "top_p") if getattr(given, name) is not None}
    return GenerationConfig(do_sample=True, **chosen) if chosen else None


def start_requests(
    engine: Engine, batch: int, prompt: int, new_tokens: int, skip_prefill: bool, sampling: GenerationConfig | None
) -> None:
    """Queues requests of random prompts, or seats them as they stand after their prefill."""
    for seed in range(batch):
        if skip_prefill:
            place_history(engine, prompt, max_new_tokens=new_tokens, seed=seed, generation_config=sampling)
        else:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(engine.vocab_size, (prompt,), generator=generator).tolist()
            engine.submit(ids, max_new_tokens=new_tokens, generation_config=sampling, seed=seed)


def decode(engine: Engine) -> list[DecodeStep]:
    """Runs all requests to their ends; returns the steps in which no prompt was computed."""
    steps = []
    before = engine.metrics()
    while engine.has_unfinished:
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        after = engine.metrics()
        if after.decode_seconds > before.decode_seconds:
            assert engine._latest_spec is not None
            steps.append(
                DecodeStep(
                    seconds=seconds,
                    tokens=after.decode_tokens - before.decode_tokens,
                    verified=after.num_verify_rounds - before.num_verify_rounds,
                    accepted=after.num_accepted_tokens - before.num_accepted_tokens,
                    streamed_bytes=after.streamed_bytes - before.streamed_bytes,
                    draft_seconds=getattr(engine._executor, "draft_seconds", None),
                    spec=engine._latest_spec,
                )
            )
        before = after
    return steps


def summarise(steps: list[DecodeStep], depth: int, link: float) -> dict[str, Any]:
    """What follows from the decode steps and the link's bytes a second."""
    seconds, tokens = sum(step.seconds for step in steps), sum(step.tokens for step in steps)
    streamed, verified = sum(step.streamed_bytes for step in steps), sum(step.verified for step in steps)
    drafted = [step.draft_seconds for step in steps if step.draft_seconds is not None]
    return {
        "decode_rounds": len(steps),
        "decode_tokens": tokens,
        "decode_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "token_ms": seconds / tokens * 1e3,
        "round_ms": seconds / len(steps) * 1e3,
        "median_round_ms": statistics.median(step.seconds for step in steps) * 1e3,
        "slowest_round_ms": max(step.seconds for step in steps) * 1e3,
        "mean_acceptance_length": 1 + sum(step.accepted for step in steps) / verified,
        "streamed_bytes": streamed,
        "link_utilization": streamed / (seconds * link) if streamed else None,
        "draft_step_ms": sum(drafted) / (len(drafted) * depth) * 1e3 if drafted and depth else None,
    }


def table_rows(figures: dict[str, Any]) -> dict[str, str]:
    """What is shown of a run\'s figures."""
    prefill = figures["prefill_seconds"]
    rows = {
        "decoding": f"{figures['tokens_per_second']:.2f} tokens/s ({figures['decode_tokens']} tokens in "
        f"{figures['decode_rounds']} rounds)",
        "drafting": f"{figures['drafting']}, {figures['num_speculative_tokens']} candidates a round at most"
        + (f"; {figures['lookahead_hit_rate']:.0%} of outcomes foreseen" if figures["drafting"] == "lookahead" else ""),
        "a token": milliseconds(figures["token_ms"]),
        "a round": milliseconds(figures["round_ms"]),
        "mean acceptance length": f"{figures['mean_acceptance_length']:.2f}"
        + (" (made up: the output is not the target's)" if figures["synthetic"] else ""),
        "prefill": "skipped" if prefill is None else f"{prefill:.2f} s",
        "streamed": format_size(figures["streamed_bytes"]),
        "link utilization": link_use(figures),
        "a draft step": milliseconds(figures["draft_step_ms"]),
        "predicted ms": predicted(figures),
        **memory_rows(figures),
    }
    for role in ("target", "draft"):
        if figures[role] and figures[role]["rope"]:
            rows[f"{role}'s positions"] = figures[role]["rope"]
    return rows
