"""Rounds of two cohorts with drafting, and the same rounds without: what drafting beside the target costs.

    python benchmarks/cohorts.py [--draft qwen3-0.6b|self] [--batch 2] [--context 16384] [--json FILE]

Requests with a random history of which nothing is resident, bfloat16, verify by turns; acceptance is made up. In one
engine, rounds with draft steps for the cohort that does not verify are measured, then rounds without. Both are taken by
the byte that they stream, since histories grow meanwhile. `on_over_off` is the quotient; `exposed` is the share of a
round that drafting adds; `link_utilization` is that of the rounds with drafting.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import MADE_UP, BenchPair, cohort_options, measured_rounds, place_requests, tokens_of_rounds
from specstream.bench_report import milliseconds, report
from specstream.bench_setup import memory_figures
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.rates import link_bandwidth


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    link = link_bandwidth(device)
    pair = BenchPair.make(given.target, given.draft, given.context, given.batch, device, given.depth)
    options = cohort_options(given.context, given.batch, given.depth)
    with closing(pair.engine(**options, **MADE_UP)) as engine:
        place_requests(engine, given.context, tokens_of_rounds(given.rounds, given.depth))
        on_seconds, on_bytes = measured_rounds(engine, given.rounds, drafts=True)
        off_seconds, off_bytes = measured_rounds(engine, given.rounds, drafts=False)
        over = on_seconds / on_bytes / (off_seconds / off_bytes)
        return {
            "benchmark": "cohorts",
            "machine": machine(device),
            "versions": versions(),
            "target": pair.target.figures(),
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
    add_device(parser)
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
