"""Rounds over a grid of batches and numbers of candidates: predicted against measured, and which give the most tokens.

    python benchmarks/grid.py [--context 32768] [--batch 1 2 4 8] [--depth 2 4 8 16] [--host-memory 100GiB]

Requests with a random history of which nothing is resident, bfloat16, a draft with a window of 1,024 tokens; 8 of 10
candidates are made up to be right after those before them were. For each batch whose histories fit into the host
memory, an engine as users get it (policy and number of candidates chosen automatically) and two that draft after each
acceptance, with those numbers of candidates, of `--depth`, that are predicted to be the best; if the first turns out to
be one of these, its rounds are measured once. Tokens a second are what such rounds give on average, over the time of
the measured ones. `worst_prediction` is the largest |predicted / measured - 1|; `least_over_sequential` the least
quotient of the automatic engine's tokens a second and the best of those that draft sequentially, `mean_over_sequential`
the mean.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import closing
from typing import Any

import torch

from specstream.bench_generate import missed
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import MADE_UP, BenchPair, measured_rounds, place_requests, tokens_of_rounds
from specstream.bench_report import Progress, prediction, report
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.depth import expected_tokens
from specstream.errors import OutOfBudget
from specstream.options import MOST_AUTO_CANDIDATES, format_size, parse_size
from specstream.parts import planning_of
from specstream.speculate import ASSUMED_ACCEPTANCE
from specstream.tuning import predicted_rate
from specstream.workload import Workload

TRIED = 2
"""Numbers of candidates that an engine which drafts sequentially is measured with."""


def best_depths(pair: BenchPair, context: int, batch: int, depths: list[int]) -> list[int]:
    """Those that are predicted to give the most tokens with sequential drafting."""
    workload = Workload(context, batch, ASSUMED_ACCEPTANCE)
    shape: dict[str, Any] = {"max_model_len": context, "max_num_seqs": batch, "drafting": "sequential"}

    def predicted(depth: int) -> float:
        options = pair.options(**shape, num_speculative_tokens=depth)
        return predicted_rate(options, planning_of(options, *pair.captured), workload)

    return sorted(sorted(depths, key=predicted)[-TRIED:])


def measure_point(pair: BenchPair, context: int, batch: int, rounds: int, **options: Any) -> dict[str, Any]:
    """The figures of one engine."""
    given = {"max_model_len": context, "max_num_seqs": batch} | options | MADE_UP
    with closing(pair.engine(**given)) as engine:
        place_requests(engine, context, tokens_of_rounds(rounds, MOST_AUTO_CANDIDATES))
        seconds, streamed = measured_rounds(engine, rounds, drafts=True)
        assert engine._latest_spec is not None
        spec, chosen = engine._latest_spec, engine.options
        foreseen = prediction(engine._planner, spec, missed(engine))["predicted_ms"]["round"]
        ms = seconds / rounds * 1e3
        tokens = len(spec.seats) * expected_tokens(ASSUMED_ACCEPTANCE, chosen.most_candidates)
        return {
            "drafting": chosen.drafting,
            "depth": chosen.most_candidates,
            "slots": engine.memory.staging_slots,
            "round_ms": ms,
            "predicted_ms": foreseen,
            "predicted_over_measured": foreseen / ms,
            "streamed_bytes_per_round": streamed / rounds,
            "tokens_per_second": tokens / ms * 1e3,
        }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device, room = choose_device(given.device), parse_size("host_memory", given.host_memory)
    pair = BenchPair.make(given.target, given.draft, given.context, max(given.batch), device)
    spec = pair.captured[0].spec
    request = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize * given.context
    points = {}
    for batch in given.batch:
        if batch * request > room:
            continue
        with Progress().working(f"{batch} x {given.context} tokens, {format_size(batch * request)}"):
            try:
                auto = measure_point(pair, given.context, batch, given.rounds, num_speculative_tokens="auto")
                fixed = [
                    auto
                    if (auto["drafting"], auto["depth"]) == ("sequential", depth)
                    else measure_point(
                        pair, given.context, batch, given.rounds, num_speculative_tokens=depth, drafting="sequential"
                    )
                    for depth in best_depths(pair, given.context, batch, given.depth)
                ]
            except OutOfBudget as error:
                raise SystemExit(f"{batch} x {given.context}: {error}; --host-memory leaves it out") from error
        best = max(point["tokens_per_second"] for point in fixed)
        points[batch] = {
            "auto": auto,
            "sequential": fixed,
            "over_sequential": auto["tokens_per_second"] / best,
        }
        if device.type == "cuda":
            torch.cuda.empty_cache()
    engines = [one for point in points.values() for one in (point["auto"], *point["sequential"])]
    ratios = [point["over_sequential"] for point in points.values()]
    return {
        "benchmark": "grid",
        "machine": machine(device),
        "versions": versions(),
        "target": pair.target.figures(),
        "draft": given.draft,
        "context": given.context,
        "points": points,
        "worst_prediction": max(abs(one["predicted_over_measured"] - 1) for one in engines),
        "least_over_sequential": min(ratios),
        "mean_over_sequential": statistics.mean(ratios),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens of each request (32768)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 2, 4, 8], help="requests (1 2 4 8)")
    parser.add_argument("--depth", type=positive, nargs="+", default=[2, 4, 8, 16], help="candidates (2 4 8 16)")
    parser.add_argument("--host-memory", default="100GiB", metavar="SIZE", help="that histories may take (100GiB)")
    parser.add_argument("--rounds", type=positive, default=6, metavar="N", help="measured of each engine (6)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {}
    for batch, point in figures["points"].items():
        for one in (point["auto"], *point["sequential"]):
            name = "auto: " if one is point["auto"] else ""
            shown[f"{batch} x {given.context}, {name}{one['drafting']}, {one['depth']} candidates"] = (
                f"{one['round_ms']:.2f} ms a round, {one['predicted_ms']:.2f} predicted; "
                f"{one['tokens_per_second']:.1f} tokens/s"
            )
    shown["worst prediction"] = f"{figures['worst_prediction']:.1%} beside what was measured"
    shown["auto over the best sequential"] = (
        f"{figures['least_over_sequential']:.3f} at least, {figures['mean_over_sequential']:.3f} on average"
    )
    shown["machine"] = figures["machine"]["device"]
    report(f"{given.target} and {given.draft}, acceptance {ASSUMED_ACCEPTANCE}", shown, figures, given.json)


if __name__ == "__main__":
    main()
