"""Output tokens a second of requests whose target drafts for itself, against the same without drafts.

    python benchmarks/self_draft_throughput.py --target DIR [--batch 16] [--context 8192] [--depth auto] [--json FILE]

Requests continue parts of a real text greedily, bfloat16 on a CUDA device, all their history streamed. Three engines do
so one after the other: "drafted" as users get it, with a ring that goes on filling while the draft proposes; "off"
without a draft; "sequential" with as many candidates as the first and a ring of four groups, so that the link waits
while the draft proposes. What is counted are rounds of all requests, without those that compute prompts. `over_off` and
`over_sequential` are the first engine's tokens a second over the other two's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from specstream import api
from specstream.bench_generate import decode, summarise
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import milliseconds, report
from specstream.bench_setup import BenchModel, memory_figures, memory_options
from specstream.bench_text import NOVEL, text_prompts
from specstream.cli import UsageError, positive
from specstream.cli_bench import add_device
from specstream.models.load import load_model
from specstream.models.tiny import TARGET
from specstream.options import SELF, SELF_WINDOW
from specstream.rates import link_bandwidth

WARMUP = 4
"""Verifications of each request that are not counted: each kind of round occurs often enough to be replayed."""
SHORT_RING = 4
"""Groups: enough to fetch and attend at the same time, and no more."""


def depth(text: str) -> int | str:
    """A number of candidates, or "auto"."""
    return text if text == "auto" else positive(text)


def measure_engine(
    target: BenchModel, prompts: list[list[int]], link: float, options: dict[str, Any], candidates: int | str
) -> dict[str, Any]:
    """The figures of one engine, over the rounds in which all requests decode.

    Memory is sized for the depth among `options`, which is the same for all, so that all stream as much.
    """
    drafts = options["drafting"] != "off"
    sized = memory_options(target, options, resident=0.0, draft=BenchModel(SELF, target.module) if drafts else None)
    with api.compile(target.module, SELF, **sized | {"num_speculative_tokens": candidates}) as engine:
        for prompt in prompts:
            engine.submit(prompt, max_new_tokens=options["max_model_len"] - len(prompt))
        steps = decode(engine)
        most = max(step.verified for step in steps)
        counted = [step for step in steps if step.verified == most][WARMUP * len(prompts) // most :]
        if not counted:
            raise UsageError("--new-tokens is too small: too few rounds in which all requests decode")
        most_candidates = engine.options.most_candidates if drafts else 0
        return {
            "num_speculative_tokens": most_candidates,
            "drafting": engine.options.drafting,
            **memory_figures(engine),
            **summarise(counted, most_candidates, link),
        }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module, tokenizer, name = load_model(given.target, dtype, device)
    target, link = BenchModel(name, module), link_bandwidth(device)
    prompts = text_prompts(tokenizer, given.text, given.batch, given.context - given.new_tokens)
    options: dict[str, Any] = {
        "max_model_len": given.context,
        "max_num_seqs": given.batch,
        "num_speculative_tokens": given.depth,
        "drafting": "auto",
        "draft_window": given.draft_window,
    }
    in_turn = options | {"drafting": "sequential", "staging_slots": SHORT_RING}
    drafted = measure_engine(target, prompts, link, options, given.depth)
    off = measure_engine(target, prompts, link, options | {"drafting": "off"}, given.depth)
    sequential = measure_engine(target, prompts, link, in_turn, drafted["num_speculative_tokens"])
    return {
        "benchmark": "self-drafting throughput",
        "machine": machine(device),
        "versions": versions(),
        "target": target.figures(),
        "text": given.text.name,
        "batch": given.batch,
        "context": given.context,
        "new_tokens": given.new_tokens,
        "depth": given.depth,
        "draft_window": given.draft_window,
        "link_bytes_per_second": link,
        "engines": {"drafted": drafted, "off": off, "sequential": sequential},
        "over_off": drafted["tokens_per_second"] / off["tokens_per_second"],
        "over_sequential": drafted["tokens_per_second"] / sequential["tokens_per_second"],
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, metavar="DIR", help="(the bundled one)")
    parser.add_argument("--text", type=Path, default=NOVEL, metavar="FILE", help=f"({NOVEL.name}, bundled)")
    parser.add_argument("--batch", type=positive, default=16, metavar="N", help="requests (16)")
    parser.add_argument("--context", type=positive, default=8192, metavar="N", help="tokens of each at its end (8192)")
    parser.add_argument("--new-tokens", type=positive, default=512, metavar="N", help="of these (512)")
    parser.add_argument("--depth", type=depth, default="auto", metavar="K", help="candidates a round (auto)")
    parser.add_argument("--draft-window", type=positive, default=SELF_WINDOW, metavar="N", help=f"({SELF_WINDOW})")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        name: f"{one['tokens_per_second']:.1f} tokens/s, {one['mean_acceptance_length']:.2f} a round of "
        f"{milliseconds(one['round_ms'])}, {one['num_speculative_tokens']} candidates, {one['drafting']}, "
        f"{one['staging_slots']} slots"
        for name, one in figures["engines"].items()
    }
    shown |= {
        "over off": f"{figures['over_off']:.2f}",
        "over sequential": f"{figures['over_sequential']:.2f}",
        "machine": figures["machine"]["device"],
    }
    title = (
        f"{figures['target']['name']}, drafting for itself, {given.batch} x {given.context} tokens of {given.text.name}"
    )
    report(title, shown, figures, given.json)


if __name__ == "__main__":
    main()
