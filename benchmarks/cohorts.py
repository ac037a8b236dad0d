"""Rounds of two cohorts with drafting, and the same rounds without: what drafting beside the target costs.

    python benchmarks/cohorts.py [--draft qwen3-0.6b|self] [--batch 2] [--context 16384] [--json FILE]

Requests with a random history of which nothing is resident, bfloat16, verify by turns; acceptance is made up (3 tokens
a round). In one engine, rounds with draft steps for the cohort that does not verify are measured, then rounds without.
Both are taken by the byte that they stream, since histories grow meanwhile. `on_over_off` is the quotient; `exposed` is
the share of a round that drafting adds; `link_utilization` is that of the rounds with drafting.
"""

from __future__ import annotations

import argparse
import time
import warnings
from contextlib import closing
from typing import Any

import torch

from specstream import api
from specstream.bench_generate import start_requests
from specstream.bench_machine import choose_device, link_bandwidth, machine, versions
from specstream.bench_report import milliseconds, report
from specstream.bench_setup import bench_model, memory_figures, memory_options
from specstream.cli import positive
from specstream.engine import Engine
from specstream.options import SELF

WARMUP = 8
"""Rounds: each kind occurs often enough to be replayed."""


def measure_rounds(engine: Engine, rounds: int, drafts: bool) -> tuple[float, float]:
    """Seconds and streamed bytes of so many rounds, drafted for or not."""
    for sequence in engine._scheduler.running:
        sequence.drafts = drafts
    for _ in range(WARMUP):
        engine.step()
    start, streamed = time.perf_counter(), engine.metrics().streamed_bytes
    for _ in range(rounds):
        engine.step()
    return time.perf_counter() - start, engine.metrics().streamed_bytes - streamed


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    new_tokens = 2 * (given.depth + 1) * (given.rounds + WARMUP)
    link = link_bandwidth(device)
    target = bench_model(given.target, given.context, dtype, device)
    options: dict[str, Any] = {
        "max_model_len": given.context,
        "max_num_seqs": given.batch,
        "num_speculative_tokens": given.depth,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": min(3.0, 1.0 + given.depth),
        "drafting": "cohorts",
        "draft_window": 1024,
    }
    draft: Any = SELF
    if given.draft != SELF:
        draft = bench_model(given.draft, given.context, dtype, device, seed=1).module
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "acceptance is made up")
        engine = api.compile(target.module, draft, **memory_options(target, options, resident=0.0))
    with closing(engine):
        start_requests(engine, given.batch, given.context - new_tokens, new_tokens, True, None)
        on_seconds, on_bytes = measure_rounds(engine, given.rounds, drafts=True)
        off_seconds, off_bytes = measure_rounds(engine, given.rounds, drafts=False)
        over = on_seconds / on_bytes / (off_seconds / off_bytes)
        return {
            "benchmark": "cohorts",
            "machine": machine(device),
            "versions": versions(),
            "target": target.figures(),
            "draft": given.draft,
            "batch": given.batch,
            "context": given.context,
            "depth": given.depth,
            **memory_figures(engine),
            "link_bytes_per_second": link,
            "on_ms": on_seconds / given.rounds * 1e3,
            "off_ms": off_seconds / given.rounds * 1e3,
            "on_over_off": over,
            "exposed": max(0.0, 1 - 1 / over),
            "link_utilization": on_bytes / (on_seconds * link),
        }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--batch", type=positive, default=2, metavar="N", help="requests (2)")
    parser.add_argument("--context", type=positive, default=16_384, metavar="N", help="tokens of each (16384)")
    parser.add_argument("--depth", type=positive, default=4, metavar="K", help="candidates a round (4)")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="measured of each kind (20)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - for stdout and nothing else")
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        "a round, drafting": milliseconds(figures["on_ms"]),
        "a round, not drafting": milliseconds(figures["off_ms"]),
        "by the byte": f"{figures['on_over_off']:.3f}",
        "exposed": f"{figures['exposed']:.1%} of a round",
        "link utilization": f"{figures['link_utilization']:.3f}",
        "machine": figures["machine"]["device"],
    }
    report(f"{given.target} and {given.draft}, {given.batch} x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
