"""Drafting for one request: what it costs a round after acceptance, with a short and a long ring, and with lookahead.

    python benchmarks/one_request.py [--draft qwen3-0.6b|self] [--ways short lookahead] [--depth 4 8 12] [--rounds 24]

One request with a random history of which nothing is resident, bfloat16; 8 of 10 candidates are made up to be right
after those before them were, and with lookahead the target's own token is foreseen as often as is assumed. For each
number of candidates there are three engines: one that drafts after acceptance, with a ring of as few slots as keep the
link busy while rounds are computed; one with the automatic ring, which holds what the link brings meanwhile; and one
with lookahead and the short ring. In each, rounds with drafting are measured, then rounds without, and taken by the
byte that they stream: the difference is what drafting exposes. `long_over_short` and `lookahead_over_short` are
quotients of what is exposed, of all numbers of candidates together; `hit_rate_error` is how far the share of outcomes
foreseen is from what was expected of it, over all rounds with lookahead: `--hit-rounds` more for each number of
candidates, after a shorter history and without taking time.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from statistics import median
from typing import Any

from specstream.bench_generate import missed
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import (
    MADE_UP,
    BenchPair,
    measured_rounds,
    place_requests,
    seconds_of_rounds,
    tokens_of_rounds,
)
from specstream.bench_report import prediction, report
from specstream.bench_setup import memory_figures
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.depth import expected_tokens
from specstream.engine import Engine
from specstream.fan_out import ITSELF, SECOND_MODEL, expected_hit_rate
from specstream.options import SELF
from specstream.rates import link_bandwidth
from specstream.speculate import ASSUMED_ACCEPTANCE

SHORT_RING = {"staging_slots": 4}
"""As many slots as an automatic ring begins with."""
ROUNDS_BEFORE = 16
"""Rounds before any is measured: misses have occurred then, too."""
HIT_CONTEXT = 8_192
"""Tokens of the request of which only hits are counted."""
WAYS: dict[str, dict[str, Any]] = {
    "short": {"drafting": "sequential"} | SHORT_RING,
    "long": {"drafting": "sequential"},
    "lookahead": {"drafting": "lookahead"} | SHORT_RING,
}


def measure_way(pair: BenchPair, depth: int, given: argparse.Namespace, way: dict[str, Any]) -> dict[str, Any]:
    """The figures of one engine."""
    options = {"max_model_len": given.context, "max_num_seqs": 1, "num_speculative_tokens": depth} | way
    with closing(pair.engine(**options, **MADE_UP)) as engine:
        place_requests(engine, given.context, tokens_of_rounds(given.rounds + ROUNDS_BEFORE, depth))
        measured_rounds(engine, ROUNDS_BEFORE, drafts=True)
        each, on_bytes = seconds_of_rounds(engine, given.rounds, drafts=True)
        on_seconds = sum(each)
        assert engine._latest_spec is not None
        foreseen = prediction(engine._planner, engine._latest_spec, missed(engine))["predicted_ms"]
        off_seconds, off_bytes = measured_rounds(engine, given.rounds, drafts=False)
        looks_ahead = way["drafting"] == "lookahead"
        outcomes, foreseen_outcomes = counted_outcomes(engine, depth, given) if looks_ahead else (0, 0)
        without = off_seconds / off_bytes * on_bytes
        return {
            "slots": memory_figures(engine)["staging_slots"],
            "device_kv_bytes": memory_figures(engine)["device_kv_bytes"],
            "round_ms": on_seconds / given.rounds * 1e3,
            "slowest_round_ms": max(each) * 1e3,
            "median_round_ms": median(each) * 1e3,
            "without_ms": without / given.rounds * 1e3,
            "exposed_ms": (on_seconds - without) / given.rounds * 1e3,
            "outcomes": outcomes,
            "foreseen": foreseen_outcomes,
            "predicted_ms": foreseen["round"],
            "predicted_exposed_ms": foreseen.get("exposed draft", 0.0),
        }


def counted_outcomes(engine: Engine, depth: int, given: argparse.Namespace) -> tuple[int, int]:
    """Outcomes, and those of them that were foreseen, of rounds of another request."""
    engine.reset()
    tokens = round(expected_tokens(ASSUMED_ACCEPTANCE, depth) * given.hit_rounds)
    place_requests(engine, min(given.context, HIT_CONTEXT), 2 * tokens)  # far more than is likely
    for _ in range(given.hit_rounds):
        engine.step()
    return engine.metrics().num_outcomes, engine.metrics().num_foreseen_outcomes


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    link = link_bandwidth(device)
    pair = BenchPair.make(given.target, given.draft, given.context, 1, device, max(given.depth) + 1)
    depths = {
        depth: {name: measure_way(pair, depth, given, WAYS[name]) for name in given.ways} for depth in given.depth
    }
    exposed = {name: sum(ways[name]["exposed_ms"] for ways in depths.values()) for name in given.ways}
    fan_out = ITSELF if given.draft == SELF else SECOND_MODEL
    expected = {depth: expected_hit_rate(ASSUMED_ACCEPTANCE, depth, fan_out) for depth in given.depth}
    figures = {
        "benchmark": "one request",
        "machine": machine(device),
        "versions": versions(),
        "target": pair.target.figures(),
        "draft": given.draft,
        "context": given.context,
        "link_bytes_per_second": link,
        "depths": depths,
        "exposed_ms": exposed,
    }
    if "short" in exposed:
        figures |= {f"{name}_over_short": each / exposed["short"] for name, each in exposed.items() if name != "short"}
    if "lookahead" in given.ways:
        counts = {depth: depths[depth]["lookahead"]["outcomes"] for depth in given.depth}
        foreseen = sum(depths[depth]["lookahead"]["foreseen"] for depth in given.depth)
        off_by = abs(foreseen - sum(expected[depth] * count for depth, count in counts.items()))
        figures |= {"expected_hit_rates": expected, "hit_rate_error": off_by / sum(counts.values())}
    return figures


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens (32768)")
    parser.add_argument("--depth", type=positive, nargs="+", default=[4, 8, 12], help="candidates a round (4 8 12)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    parser.add_argument("--rounds", type=positive, default=24, metavar="N", help="measured of each kind (24)")
    parser.add_argument("--hit-rounds", type=positive, default=334, metavar="N", help="more with lookahead (334)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        f"{depth} candidates, {name}": f"{one['slots']} slots, {one['round_ms']:.2f} ms a round "
        f"({one['predicted_ms']:.2f} predicted; the slowest {one['slowest_round_ms']:.2f}), "
        f"{one['exposed_ms']:.2f} of it exposed"
        + (f"; {one['foreseen']} of {one['outcomes']} outcomes foreseen" if name == "lookahead" else "")
        for depth, ways in figures["depths"].items()
        for name, one in ways.items()
    }
    if "expected_hit_rates" in figures:
        rates = figures["expected_hit_rates"].items()
        shown["expected of lookahead"] = ", ".join(f"{rate:.3f} of {depth} candidates" for depth, rate in rates)
    shown["machine"] = figures["machine"]["device"]
    report(f"{given.target} and {given.draft}, 1 x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
