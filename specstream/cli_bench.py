"""What `specstream bench` accepts. Like `cli`, it imports torch only when a benchmark runs."""

from __future__ import annotations

import argparse
from typing import Any

from specstream.cli import DTYPES, add_command, add_option_flags, add_trace_flag, positive

MEMORY = ("chunk_tokens", "group_chunks", "staging_slots", "host_kv_budget")
DRAFTING = (
    "drafting",
    "lookahead_branches",
    "draft_window",
    "draft_sink",
    "synthetic_acceptance_rate",
    "synthetic_acceptance_length",
)


def add_bench(commands: Any) -> None:
    """Adds `bench` and its own commands."""
    bench = add_command(
        commands, "bench", None, "measure a device, or rounds and decoding, with random weights if you like"
    )
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    rounds = add_command(benchmarks, "round", _round, "verification rounds of a target alone, in steady state")
    _add_shared(rounds, context="tokens of a request, the round's queries included (32768)")
    rounds.add_argument("--queries", type=positive, default=5, metavar="N", help="tokens verified a request (5)")
    rounds.add_argument("--rounds", type=positive, default=20, metavar="N", help="rounds that count (20)")
    rounds.add_argument("--warmup", type=positive, default=3, metavar="N", help="rounds before them (3)")
    rounds.add_argument(
        "--commit-every",
        type=_whole,
        default=0,
        metavar="N",
        help="every N-th round commits a chunk, so that the chunk list changes; 0: no round does (0)",
    )
    add_option_flags(rounds, MEMORY)

    generate = add_command(benchmarks, "generate", _generate, "decoding as a user drives it")
    _add_shared(generate, context="tokens of a request, prompt and output (32768)")
    generate.add_argument(
        "--draft",
        default="none",
        metavar="PRESET|DIR|self|none",
        help="the model that proposes; self: the target (none)",
    )
    generate.add_argument("--new-tokens", type=positive, default=128, metavar="N", help="of a request (128)")
    generate.add_argument("--depth", type=_depth, default=4, metavar="K|auto", help="candidates a round at most (4)")
    generate.add_argument(
        "--warmup", type=_whole, default=3, metavar="N", help="first decode rounds, which do not count (3)"
    )
    generate.add_argument(
        "--skip-prefill", action="store_true", help="begin with a random history in place of a prompt computed"
    )
    for name in ("temperature", "top-p"):
        generate.add_argument(f"--{name}", type=float, metavar="X", help="sample with it (greedy without such a flag)")
    add_trace_flag(generate)
    add_option_flags(generate, (*MEMORY, "gpu_kv_budget", "max_num_batched_tokens", *DRAFTING))

    device = add_command(benchmarks, "device", _device, "measure a device anew; plans on it are predicted by that")
    add_device(device)
    device.add_argument("--debug", action="store_true", help="errors show where they arose")


def _add_shared(parser: argparse.ArgumentParser, *, context: str) -> None:
    parser.add_argument("--target", required=True, metavar="PRESET|DIR", help="a shape of random weights, or a folder")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help=context)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="requests (1)")
    parser.add_argument(
        "--resident",
        type=_share,
        default=0.0,
        metavar="SHARE|all",
        help="share of the history that stays on the device, from 0 (as little as works) to 1 or all (0)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the models (bfloat16)")
    add_device(parser)
    parser.add_argument(
        "--memory-cap", metavar="SIZE", help="fail rather than take more of a CUDA device's memory for tensors (none)"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Flags of everything that measures: where, and where to."""
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; - for stdout and nothing else")


def _round(given: argparse.Namespace) -> int:
    from specstream.bench_round import run

    return run(given)


def _generate(given: argparse.Namespace) -> int:
    from specstream.bench_generate import run

    return run(given)


def _device(given: argparse.Namespace) -> int:
    from specstream.bench_device import run

    return run(given)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _depth(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _share(text: str) -> float:
    try:
        share = 1.0 if text.lower() == "all" else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: a number from 0 to 1, or all")
    return share
