"""Device memory at most, predicted and measured, of engines in six configurations, each with prompts and decoding.

    python benchmarks/peak_memory.py [--target qwen3-8b] [--draft qwen3-0.6b] [--small qwen3-0.6b] [--context 131072]

Requests of random tokens, bfloat16, are computed from their first token on and decoded; acceptance is made up. What is
predicted is what the engine plans: weights, KV and work memory. What is measured is the most that tensors take once the
engine is made, by torch's allocator; on a CPU nothing is. `worst_error` is the largest of the configurations' errors,
as a share of what is measured.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from specstream.bench_generate import decode, start_requests
from specstream.bench_machine import choose_device, give_memory_back, machine, peak_memory, reset_peak_memory, versions
from specstream.bench_pair import MADE_UP, BenchPair
from specstream.bench_report import report
from specstream.bench_setup import memory_figures
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.options import SELF, format_size

DEPTH = 4
"""Candidates a round, unless a configuration says otherwise."""


@dataclass(frozen=True)
class Configuration:
    """Requests of one length, and the options of their engine."""

    models: tuple[str, str | None]
    """The arguments that name the target and the draft, which may be the target itself; None: nothing drafts."""
    batch: int
    shorter: int
    """By what factor its requests are shorter than the longest ones of all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Nothing is resident unless they say so."""


PAIR = ("target", "draft")
CONFIGURATIONS = (
    Configuration(PAIR, 1, 4, {"drafting": "sequential"}),
    Configuration(PAIR, 2, 8, {"drafting": "cohorts"}),
    Configuration(PAIR, 8, 16, {"num_speculative_tokens": 8}),
    Configuration(PAIR, 1, 1, {"drafting": "sequential"}),
    Configuration(("target", SELF), 4, 16),
    Configuration(("small", None), 1, 8, {"gpu_kv_budget": "auto"}),
)


def measure_one(given: argparse.Namespace, one: Configuration, device: torch.device) -> dict[str, Any]:
    """The figures of one engine, of models that are made for it; what was there before them does not count."""
    forget(device)
    reset_peak_memory(device)
    before = peak_memory(device) or 0
    of_target, of_draft = one.models
    target, drafts, context = getattr(given, of_target), of_draft is not None, given.context // one.shorter
    draft = given.draft if of_draft == "draft" else SELF
    options = {"max_model_len": context, "max_num_seqs": one.batch, "num_speculative_tokens": DEPTH} | one.options
    pair = BenchPair.make(target, draft, context, one.batch, device, options["num_speculative_tokens"])
    made_up = MADE_UP if drafts else {}
    with closing(pair.engine(drafts=drafts, **options, **made_up)) as engine:
        reset_peak_memory(device)
        start_requests(engine, one.batch, context - given.new_tokens, given.new_tokens, False, None)
        decode(engine)
        peak, memory = peak_memory(device), memory_figures(engine)
    most = None if peak is None else peak - before
    return {
        "target": target,
        "draft": draft if drafts else None,
        "batch": one.batch,
        "context": context,
        **memory,
        "peak_device_bytes": most,
        "error": None if most is None else memory["planned_device_bytes"] / most - 1,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    if device.type == "cuda":
        torch.cuda.init()  # before anything asks the allocator for its figures
    configurations = [measure_one(given, one, device) for one in CONFIGURATIONS]
    errors = [abs(one["error"]) for one in configurations if one["error"] is not None]
    return {
        "benchmark": "peak memory",
        "machine": machine(device),
        "versions": versions(),
        "new_tokens": given.new_tokens,
        "configurations": configurations,
        "worst_error": max(errors, default=None),
    }


def forget(device: torch.device) -> None:
    """Frees what an earlier engine has left: its models, and what a library keeps for its streams."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    give_memory_back()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR")
    parser.add_argument("--small", default="qwen3-0.6b", metavar="PRESET|DIR", help="target of which all is resident")
    longest = "tokens of the longest requests, of which the others have a part (131072)"
    parser.add_argument("--context", type=positive, default=131_072, metavar="N", help=longest)
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="decoded of each request (64)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {_name(one): _text(one) for one in figures["configurations"]}
    if figures["worst_error"] is not None:
        shown["worst error"] = f"{figures['worst_error']:.1%}"
    shown["machine"] = figures["machine"]["device"]
    report("device memory at most", shown, figures, given.json)


def _name(one: dict[str, Any]) -> str:
    drafts = "" if one["draft"] is None else f", draft {one['draft']}"
    return f"{one['target']}{drafts}, {one['batch']} x {one['context']} tokens"


def _text(one: dict[str, Any]) -> str:
    predicted = f"{format_size(one['planned_device_bytes'])} predicted"
    if one["error"] is None:
        return predicted
    return f"{predicted}, {format_size(one['peak_device_bytes'])} measured: {one['error']:+.1%}"


if __name__ == "__main__":
    main()
