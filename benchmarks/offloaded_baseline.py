"""Milliseconds a token with the KV in host memory: SpecStream, and transformers' `generate` with an offloaded cache.

    python benchmarks/offloaded_baseline.py [--target qwen3-8b] [--context 32768] [--json FILE]

One request, greedy, without a draft, the same random weights in both. transformers computes its prompt; SpecStream
begins with a random history, which takes as long to stream. `times_faster` is the quotient of the two, once
transformers has all the pinned memory that it will use; `times_faster_at_first` counts all of its few tokens, the first
of which wait for that memory. `over_link` is SpecStream's time over what the link takes for the bytes of a token:
without a draft there is no way to be faster than that.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specstream import cli
from specstream.bench_generate import measure as measure_decoding
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import Progress, milliseconds, report
from specstream.bench_resident import wait_for
from specstream.bench_setup import BenchModels, bench_model
from specstream.cli import positive
from specstream.cli_bench import add_device

WARMUP = 2
"""Tokens of transformers after its first that wait for pinned memory."""


class Clock(LogitsProcessor):
    """Notes when the scores of each token are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        wait_for(scores.device)
        self.times.append(time.perf_counter())
        return scores


def ours(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of `specstream bench generate`."""
    asked = ["--target", given.target, "--context", str(given.context), "--device", given.device]
    more = ["--new-tokens", str(given.new_tokens), "--skip-prefill"]
    return measure_decoding(
        cli.make_parser().parse_args(["bench", "generate", *asked, *more]), Progress(), BenchModels()
    )


def theirs(given: argparse.Namespace) -> list[float]:
    """Milliseconds of each token of transformers after the first."""
    device = choose_device(given.device)
    model: Any = bench_model(given.target, given.context, torch.bfloat16, device).module
    generator = torch.Generator().manual_seed(0)
    shape = 1, given.context - given.their_tokens
    ids: Tensor = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    clock = Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=given.their_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=given.cache,
        logits_processor=[clock],
    )
    return [(b - a) * 1e3 for a, b in pairwise(clock.times)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens (32768)")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="of SpecStream (64)")
    parser.add_argument("--their-tokens", type=positive, default=10, metavar="N", help="of transformers (10)")
    parser.add_argument("--cache", default="offloaded", help="transformers' cache_implementation (offloaded)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures, device = ours(given), choose_device(given.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    apart = theirs(given)
    transformers_ms, at_first_ms = statistics.median(apart[WARMUP:]), statistics.mean(apart)
    link_ms = figures["streamed_bytes"] / figures["decode_tokens"] / figures["link_bytes_per_second"] * 1e3
    result = {
        "benchmark": "offloaded baseline",
        "machine": machine(device),
        "versions": versions(),
        "target": figures["target"],
        "context": given.context,
        "token_ms": figures["token_ms"],
        "transformers_token_ms": transformers_ms,
        "transformers_at_first_ms": at_first_ms,
        "times_faster": transformers_ms / figures["token_ms"],
        "times_faster_at_first": at_first_ms / figures["token_ms"],
        "over_link": figures["token_ms"] / link_ms,
    }
    shown = {
        "SpecStream, a token": milliseconds(result["token_ms"]),
        f"transformers, cache {given.cache}, a token": milliseconds(transformers_ms),
        f"the first {given.their_tokens} tokens, on average": milliseconds(at_first_ms),
        "times faster": f"{result['times_faster']:.2f}, {result['times_faster_at_first']:.2f} than the first ones",
        "over the link's time": f"{result['over_link']:.3f}",
        "machine": result["machine"]["device"],
    }
    report(f"{given.target}, 1 x {given.context} tokens, greedy, no draft", shown, result, given.json)


if __name__ == "__main__":
    main()
