"""What recording a schedule costs: rounds of two cohorts, traced and not, by turns in one engine.

    python benchmarks/trace_overhead.py [--batch 2] [--context 16384] [--logdir DIR] [--json FILE]

Requests with a random history of which nothing is resident, bfloat16, whose acceptance is made up, are drafted for
beside the target. Both kinds of rounds are taken by the byte that they stream, since histories grow meanwhile, and both
are measured once what is captured for them is. `overhead` is what tracing adds, as a share. The trace is kept in
`--logdir`, with the `--kept` latest rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import MADE_UP, BenchPair, cohort_options, measured_rounds, place_requests, tokens_of_rounds
from specstream.bench_report import milliseconds, report
from specstream.bench_setup import memory_figures
from specstream.cli import positive
from specstream.cli_bench import add_device

TURNS = 2
"""Of each kind: what changes in the course of a run falls on both."""


def measure(given: argparse.Namespace, logdir: Path) -> dict[str, Any]:
    device = choose_device(given.device)
    pair = BenchPair.make(given.target, given.draft, given.context, given.batch, device, given.depth)
    options = cohort_options(given.context, given.batch, given.depth)
    seconds, streamed = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    with closing(pair.engine(**options, **MADE_UP)) as engine:
        place_requests(engine, given.context, TURNS * tokens_of_rounds(given.rounds, given.depth))
        for _ in range(TURNS):
            plain = measured_rounds(engine, given.rounds, drafts=True)
            name = f"{Path(given.target).name}-{given.batch}x{given.context}"
            with engine.trace(logdir, run=name, rounds=given.kept) as run:
                traced = measured_rounds(engine, given.rounds, drafts=True)
            for kind, (took, moved) in ((False, plain), (True, traced)):
                seconds[kind] += took
                streamed[kind] += moved
        rounds = TURNS * given.rounds
        return {
            "benchmark": "trace overhead",
            "machine": machine(device),
            "versions": versions(),
            "target": pair.target.figures(),
            "draft": given.draft,
            "batch": given.batch,
            "context": given.context,
            "depth": given.depth,
            **memory_figures(engine),
            "traced_ms": seconds[True] / rounds * 1e3,
            "plain_ms": seconds[False] / rounds * 1e3,
            "overhead": seconds[True] / streamed[True] / (seconds[False] / streamed[False]) - 1,
            "run": run.name,
            "run_bytes": sum(file.stat().st_size for file in run.rglob("*") if file.is_file()),
        }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--batch", type=positive, default=2, metavar="N", help="requests (2)")
    parser.add_argument("--context", type=positive, default=16_384, metavar="N", help="tokens of each (16384)")
    parser.add_argument("--depth", type=positive, default=4, metavar="K", help="candidates a round (4)")
    parser.add_argument("--rounds", type=positive, default=92, metavar="N", help="measured at a turn (92)")
    parser.add_argument("--kept", type=positive, default=20, metavar="N", help="rounds that the trace keeps (20)")
    parser.add_argument("--logdir", type=Path, metavar="DIR", help="for the trace (none: it is thrown away)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    with tempfile.TemporaryDirectory() as thrown_away:
        figures = measure(given, given.logdir or Path(thrown_away))
    shown = {
        "a round, traced": milliseconds(figures["traced_ms"]),
        "a round, not traced": milliseconds(figures["plain_ms"]),
        "overhead, by the byte": f"{figures['overhead']:.2%}",
        "the run": f"{figures['run_bytes'] / 1e3:.0f} kB, {given.kept} rounds at most",
        "machine": figures["machine"]["device"],
    }
    report(f"{given.target} and {given.draft}, {given.batch} x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
