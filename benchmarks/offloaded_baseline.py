"""Milliseconds a token with the KV in host memory: SpecStream, and transformers' `generate` with an offloaded cache.

    python benchmarks/offloaded_baseline.py [--target qwen3-8b] [--context 32768] [--json FILE]

One request, greedy, without a draft, the same random weights in both. transformers computes its prompt; SpecStream
begins with a random history, which takes as long to stream. `times_faster` is the quotient of the two.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
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

WARMUP = 2
"""First tokens of transformers that do not count."""


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


def theirs(given: argparse.Namespace) -> float:
    """Milliseconds a token of transformers, the median."""
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
    apart = [(b - a) * 1e3 for a, b in zip(clock.times[WARMUP:-1], clock.times[WARMUP + 1 :], strict=True)]
    return statistics.median(apart)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens (32768)")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="of SpecStream (64)")
    parser.add_argument("--their-tokens", type=positive, default=10, metavar="N", help="of transformers (10)")
    parser.add_argument("--cache", default="offloaded", help="transformers' cache_implementation (offloaded)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - for stdout and nothing else")
    return parser


def main() -> None:
    given = parser().parse_args()
    figures, device = ours(given), choose_device(given.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    transformers_ms = theirs(given)
    result = {
        "benchmark": "offloaded baseline",
        "machine": machine(device),
        "versions": versions(),
        "target": figures["target"],
        "context": given.context,
        "token_ms": figures["token_ms"],
        "transformers_token_ms": transformers_ms,
        "times_faster": transformers_ms / figures["token_ms"],
    }
    shown = {
        "SpecStream, a token": milliseconds(result["token_ms"]),
        f"transformers, cache {given.cache}, a token": milliseconds(transformers_ms),
        "times faster": f"{result['times_faster']:.2f}",
        "machine": result["machine"]["device"],
    }
    report(f"{given.target}, 1 x {given.context} tokens, greedy, no draft", shown, result, given.json)


if __name__ == "__main__":
    main()
