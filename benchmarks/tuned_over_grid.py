"""What tuning finds, and what an engine chooses untuned, beside every setting of a grid.

    python benchmarks/tuned_over_grid.py [--context 32768] [--batch 1] [--budget 2GiB] [--json FILE]

First an engine is tuned as `specstream tune` does it. Then, in the same process, what was found, what would be chosen
untuned, and every setting of the grid that fits into the budget are measured alike. `tuned_over_grid` and
`untuned_over_grid` are quotients of tokens a second and those of the grid's best. Random weights, bfloat16; acceptance
is made up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import product
from typing import Any

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import DRAFT_WINDOW, BenchPair
from specstream.bench_report import Progress, report
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.engine import Engine
from specstream.errors import OutOfBudget
from specstream.options import Options
from specstream.parts import make_parts
from specstream.trial import Stopwatch
from specstream.tuned_settings import TunedSettings
from specstream.tuning import tune

CHUNKS, SLOTS, DEPTHS = (128, 512, 2048, 4096), (2, 4, 8), (2, 8, 32)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device, progress = choose_device(given.device), Progress()
    pair = BenchPair.make(given.target, given.draft, given.context, given.batch, device, max(DEPTHS))
    options = Options(
        max_model_len=given.context,
        max_num_seqs=given.batch,
        num_speculative_tokens="auto",
        gpu_kv_budget=given.budget,
        draft_window=DRAFT_WINDOW,
    )
    started = time.perf_counter()
    with closing(Engine(make_parts(options, *pair.captured))) as engine:
        made = time.perf_counter()
        found = tune(engine, told=lambda trial: print(trial, flush=True) if given.json != "-" else None)
        took = time.perf_counter() - made
        planned = {"device_kv_bytes": engine.memory.device_kv}
    assert found.best is not None
    stopwatch = Stopwatch(options, *pair.captured, found.workload)
    tuned, untuned = found.best.settings, found.trials[0].settings
    rates = {settings: stopwatch.rate(settings, 0.0) for settings in dict.fromkeys((tuned, untuned))}
    grid = dict[TunedSettings, float]()
    cells = list(product(CHUNKS, SLOTS, DEPTHS))
    for index in progress.counted(range(len(cells)), "the grid"):
        chunk, slots, depth = cells[index]
        group = max(1, tuned.group_chunks * tuned.chunk_tokens // chunk)
        settings = TunedSettings(chunk, group, slots, depth, tuned.drafting)
        with suppress(OutOfBudget):
            grid[settings] = stopwatch.rate(settings, max(grid.values(), default=0.0))
    best = max(grid, key=grid.__getitem__)
    return {
        "benchmark": "tuned over grid",
        "machine": machine(device),
        "versions": versions(),
        "target": pair.target.figures(),
        "draft": given.draft,
        "workload": asdict(found.workload),
        "budget": given.budget,
        **planned,
        "engine_seconds": made - started,
        "tuning_seconds": took,
        "trials": [asdict(trial) for trial in found.trials],
        "num_trials": len(found.trials),
        "tuned": asdict(tuned) | {"tokens_per_second": rates[tuned]},
        "untuned": asdict(untuned) | {"tokens_per_second": rates[untuned]},
        "grid": [asdict(settings) | {"tokens_per_second": rate} for settings, rate in grid.items()],
        "best_of_grid": asdict(best) | {"tokens_per_second": grid[best]},
        "tuned_over_grid": rates[tuned] / grid[best],
        "untuned_over_grid": rates[untuned] / grid[best],
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="requests (1)")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens of each (32768)")
    parser.add_argument("--budget", default="2GiB", metavar="SIZE", help="of the target's KV on the device (2GiB)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:  # nothing is left that engines of the user's would find
        os.environ["XDG_CACHE_HOME"] = folder
        figures = measure(given)
    shown = {
        "tuning": f"{figures['num_trials']} trials in {figures['tuning_seconds']:.1f} s",
        "an engine": f"made in {figures['engine_seconds']:.1f} s",
    }
    for name in ("tuned", "untuned", "best_of_grid"):
        settings = dict(figures[name])
        rate = settings.pop("tokens_per_second")
        shown[name.replace("_", " ")] = f"{rate:.2f} tokens/s: {TunedSettings(**settings)}"
    shown["grid"] = f"{len(figures['grid'])} settings that fit, of {len(CHUNKS) * len(SLOTS) * len(DEPTHS)}"
    shown["tuned / grid"], shown["untuned / grid"] = (
        f"{figures[name]:.3f}" for name in ("tuned_over_grid", "untuned_over_grid")
    )
    shown["machine"] = figures["machine"]["device"]
    report(f"{given.target} and {given.draft}, {given.batch} x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
