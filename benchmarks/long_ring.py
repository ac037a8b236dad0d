"""Drafting after acceptance: what it costs a round with a ring that holds what the link brings meanwhile, and without.

    python benchmarks/long_ring.py [--draft qwen3-0.6b|self] [--context 32768] [--depth 4 8 12] [--json FILE]

One request with a random history of which nothing is resident, bfloat16; 8 of 10 candidates are made up to be right
after those before them were. For each number of candidates there are two engines: one with the automatic ring, and one
whose ring has as few slots as keep the link busy while rounds are computed. In each, rounds with drafting are measured,
then rounds without, and taken by the byte that they stream: the difference is what drafting exposes. `exposed_ms` and
`short_ring_exposed_ms` are of all numbers of candidates together, `over_short_ring` is their quotient, `exposed` the
largest share of a round.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import BenchPair, made_up, measured_rounds, place_requests, tokens_of_rounds
from specstream.bench_report import prediction, report
from specstream.bench_setup import memory_figures
from specstream.cli import positive
from specstream.rates import link_bandwidth

ACCEPTANCE = 0.8
SHORT_RING = 4
"""Slots: as many as an automatic ring begins with."""


def measure_ring(pair: BenchPair, depth: int, given: argparse.Namespace, ring: dict[str, int]) -> dict[str, Any]:
    """The figures of one ring and number of candidates."""
    options = {"max_model_len": given.context, "max_num_seqs": 1, "num_speculative_tokens": depth} | ring
    with closing(pair.engine(drafting="sequential", **options, **made_up(ACCEPTANCE))) as engine:
        place_requests(engine, given.context, tokens_of_rounds(given.rounds, depth))
        on_seconds, on_bytes = measured_rounds(engine, given.rounds, drafts=True)
        assert engine._latest_spec is not None
        foreseen = prediction(engine._planner, engine._latest_spec)["predicted_ms"]
        off_seconds, off_bytes = measured_rounds(engine, given.rounds, drafts=False)
        without = off_seconds / off_bytes * on_bytes
        return {
            "slots": memory_figures(engine)["staging_slots"],
            "device_kv_bytes": memory_figures(engine)["device_kv_bytes"],
            "round_ms": on_seconds / given.rounds * 1e3,
            "without_ms": without / given.rounds * 1e3,
            "exposed_ms": (on_seconds - without) / given.rounds * 1e3,
            "predicted_ms": foreseen["round"],
            "predicted_exposed_ms": foreseen["exposed draft"],
            "draft_ms": foreseen["draft"],
        }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    link = link_bandwidth(device)
    pair = BenchPair.make(given.target, given.draft, given.context, 1, device, max(given.depth))
    depths = {
        depth: {
            "long": measure_ring(pair, depth, given, {}),
            "short": measure_ring(pair, depth, given, {"staging_slots": SHORT_RING}),
        }
        for depth in given.depth
    }
    exposed, at_first = (sum(rings[name]["exposed_ms"] for rings in depths.values()) for name in ("long", "short"))
    return {
        "benchmark": "long ring",
        "machine": machine(device),
        "versions": versions(),
        "target": pair.target.figures(),
        "draft": given.draft,
        "context": given.context,
        "link_bytes_per_second": link,
        "depths": depths,
        "exposed_ms": exposed,
        "short_ring_exposed_ms": at_first,
        "over_short_ring": exposed / at_first,
        "exposed": max(rings["long"]["exposed_ms"] / rings["long"]["round_ms"] for rings in depths.values()),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens (32768)")
    parser.add_argument("--depth", type=positive, nargs="+", default=[4, 8, 12], help="candidates a round (4 8 12)")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="measured of each kind (20)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - for stdout and nothing else")
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        f"{depth} candidates, {name} ring, {one['slots']} slots": f"{one['round_ms']:.2f} ms a round "
        f"({one['predicted_ms']:.2f} predicted), {one['exposed_ms']:.2f} of it exposed "
        f"({one['predicted_exposed_ms']:.2f}) of {one['draft_ms']:.2f} ms of drafting"
        for depth, rings in figures["depths"].items()
        for name, one in rings.items()
    }
    shown["machine"] = figures["machine"]["device"]
    report(f"{given.target} and {given.draft}, 1 x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
