"""A slow draft of which no candidate is ever accepted, against no draft: what it costs once it is turned off.

    python benchmarks/useless_draft.py [--draft qwen3-1.7b] [--context 32768] [--json FILE]

One request with a random history of which nothing is resident, bfloat16, greedy. Both models' weights are random, so
that they never agree; after some rounds the engine turns speculation off for the request. Rounds from then on are
measured, and those of an engine without a draft, and taken by the byte that they stream. `over_off` is the quotient of
their tokens a second, one a round; `rounds_until_off` is how many verifications of candidates it took.
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import closing
from typing import Any

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import BenchPair, measured_rounds, place_requests, tokens_of_rounds
from specstream.bench_report import milliseconds, report
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.engine import Engine
from specstream.errors import SpecStreamWarning

MOST_ROUNDS = 64
"""Until speculation is off."""


def rounds_until_off(engine: Engine) -> int:
    """Runs rounds until the request is not drafted for; how many of them verified candidates."""
    request, rounds = engine._scheduler.running[0], 0
    for _ in range(MOST_ROUNDS):
        if not request.drafts:
            return rounds
        rounds += bool(request.candidates.tokens)
        engine.step()
    raise SystemExit(f"speculation is still on after {MOST_ROUNDS} rounds: the draft is not useless")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    pair = BenchPair.make(given.target, given.draft, given.context, 1, device, given.depth)
    options = {"max_model_len": given.context, "max_num_seqs": 1, "num_speculative_tokens": given.depth}
    room = tokens_of_rounds(given.rounds + MOST_ROUNDS, given.depth)
    with closing(pair.engine(**options)) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecStreamWarning)
        place_requests(engine, given.context, room)
        until_off = rounds_until_off(engine)
        seconds, streamed = measured_rounds(engine, given.rounds, drafts=False)
    with closing(pair.engine(drafts=False, **options)) as engine:
        place_requests(engine, given.context, room)
        alone_seconds, alone_streamed = measured_rounds(engine, given.rounds, drafts=False)
    return {
        "benchmark": "useless draft",
        "machine": machine(device),
        "versions": versions(),
        "target": pair.target.figures(),
        "draft": pair.draft.figures(),
        "context": given.context,
        "depth": given.depth,
        "rounds_until_off": until_off,
        "round_ms": seconds / given.rounds * 1e3,
        "alone_ms": alone_seconds / given.rounds * 1e3,
        "over_off": alone_seconds / alone_streamed / (seconds / streamed),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-1.7b", metavar="PRESET|DIR")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens (32768)")
    parser.add_argument("--depth", type=positive, default=4, metavar="K", help="candidates a round (4)")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="measured of each kind (20)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        "speculation is off after": f"{figures['rounds_until_off']} rounds",
        "a round then": milliseconds(figures["round_ms"]),
        "a round without a draft": milliseconds(figures["alone_ms"]),
        "tokens/s, over those without": f"{figures['over_off']:.3f}",
        "machine": figures["machine"]["device"],
    }
    report(f"{given.target} and {given.draft}, 1 x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
