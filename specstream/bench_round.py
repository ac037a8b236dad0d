"""`specstream bench round`: verification rounds of a target alone, in steady state, over a history of random KV.

Every seat verifies the same number of random candidates in every round. A round is then rolled back, so that all are
alike; with --commit-every N every N-th one commits a whole chunk instead, and the chunk list changes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from specstream.bench_machine import (
    cap_memory,
    choose_device,
    machine,
    peak_memory,
    reset_peak_memory,
    versions,
)
from specstream.bench_report import Progress, link_use, memory_rows, milliseconds, predicted, prediction, report
from specstream.bench_setup import BenchModels, given_options, memory_figures, memory_options, named_as_typed
from specstream.bench_steady import Round, SteadyRounds
from specstream.cli import UsageError, chosen_options
from specstream.options import format_size
from specstream.rates import device_copy_bandwidth, link_bandwidth

MOST_QUERIES = 129
"""A token of the target's own and 128 candidates."""


def run(given: argparse.Namespace) -> int:
    """The command."""
    with named_as_typed():
        figures = measure(given, Progress(), BenchModels())
    title = f"{given.target}, {given.batch} x {given.context} tokens, {given.queries} queries"
    report(title, table_rows(figures), figures, given.json)
    return 0


def measure(given: argparse.Namespace, progress: Progress, models: BenchModels) -> dict[str, Any]:
    """Builds an engine, runs the rounds and returns the figures."""
    if given.queries > MOST_QUERIES:
        raise UsageError(f"--queries {given.queries}: at most {MOST_QUERIES}")
    device = choose_device(given.device)
    cap_memory(device, given.memory_cap)
    options = chosen_options(given) | {
        "num_speculative_tokens": max(1, given.queries - 1),
        "max_model_len": given.context,
        "max_num_seqs": given.batch,
    }
    # Before anything is counted, each kind of round that a commit leads to has been run.
    warmup = max(given.warmup, 2 * given.commit_every + 1)
    with progress.working("measuring link and memory"):
        link, device_copy = link_bandwidth(device), device_copy_bandwidth(device)
    reset_peak_memory(device)
    started = time.perf_counter()
    with progress.working(f"making and capturing {given.target}"):
        target = models.target(given.target, given.context, getattr(torch, given.dtype), device)
        options = memory_options(target, options, given.resident)
        history = history_tokens(given, warmup, options["chunk_tokens"])
        engine = models.engine(target, options)
    with closing(engine):
        with progress.working("filling the history"):
            steady = SteadyRounds(engine, given.batch, history, given.queries, given.commit_every)
        setup_seconds, setup_peak = time.perf_counter() - started, peak_memory(device)
        reset_peak_memory(device)
        rounds = [steady.run() for _ in progress.counted(range(warmup + given.rounds), "rounds")][warmup:]
        return {
            "benchmark": "round",
            "machine": machine(device),
            "versions": versions(),
            "options": given_options(given) | {"history": history, "warmup": warmup},
            "target": target.figures(),
            "setup_seconds": setup_seconds,
            **memory_figures(engine),
            "link_bytes_per_second": link,
            "device_copy_bytes_per_second": device_copy,
            **summarise(rounds, link),
            **prediction(engine._planner, steady.latest),
            "setup_peak_device_bytes": setup_peak,
            "peak_device_bytes": peak_memory(device),
            "rounds": [asdict(one) for one in rounds],
        }


def history_tokens(given: argparse.Namespace, warmup: int, chunk_tokens: int) -> int:
    """Tokens of each request before the first round, so that the last round all but reaches the context's end."""
    commits = (warmup + given.rounds) // given.commit_every if given.commit_every else 0
    history: int = given.context - given.queries - 2 - commits * chunk_tokens
    if history < 1:
        commit = f" and {commits} commits of {chunk_tokens} tokens" if commits else ""
        raise UsageError(f"--context {given.context} leaves no history before {given.queries} queries{commit}")
    return history


def summarise(rounds: list[Round], link: float) -> dict[str, Any]:
    """What follows from the rounds and the link's bytes a second."""
    times = [one.ms for one in rounds]
    median, streamed = statistics.median(times), statistics.median(one.streamed_bytes for one in rounds)
    launches = [one.launch_ms for one in rounds if one.launch_ms is not None]
    # A history that grows takes longer: what a change costs shows in the time a byte.
    costs = [one.ms / (one.streamed_bytes or 1) for one in rounds]
    changed = [cost for cost, one in zip(costs, rounds, strict=True) if one.changed]
    return {
        "round_ms": median,
        "round_ms_min": min(times),
        "round_ms_max": max(times),
        "streamed_bytes_per_round": streamed,
        "link_utilization": streamed / (median / 1e3 * link) if streamed else None,
        "launch_ms": statistics.median(launches) if launches else None,
        "changed_rounds": len(changed),
        "planned_rounds": sum(one.planned for one in rounds),
        "slowest_changed_over_median": max(changed) / statistics.median(costs) if changed else None,
    }


def table_rows(figures: dict[str, Any]) -> dict[str, str]:
    """What is shown of a run\'s figures."""
    rows = {
        "round": f"{milliseconds(figures['round_ms'])} (median; {figures['round_ms_min']:.2f} to "
        f"{figures['round_ms_max']:.2f} in {len(figures['rounds'])} rounds)",
        "streamed a round": f"{format_size(figures['streamed_bytes_per_round'])} of {figures['options']['batch']} x "
        f"{figures['options']['history']} tokens",
        "link utilization": link_use(figures),
        "copy on the device": f"{figures['device_copy_bytes_per_second'] / 1e9:.1f} GB/s",
        "host launch": milliseconds(figures["launch_ms"]),
        "predicted ms": predicted(figures),
        **memory_rows(figures),
    }
    if figures["target"]["rope"]:
        rows["target's positions"] = figures["target"]["rope"]
    if figures["changed_rounds"]:
        rows["slowest changed round"] = (
            f"{figures['slowest_changed_over_median']:.3f} x the median a byte; {figures['changed_rounds']} changed, "
            f"{figures['planned_rounds']} planned anew"
        )
    return rows
