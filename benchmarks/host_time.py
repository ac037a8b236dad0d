"""Where the host's time goes in rounds in which nothing streams: those of a device that waits for its host.

    python benchmarks/host_time.py [--target qwen3-8b] [--context 1024] [--rounds 40]

One request, everything on the device, one query a round. Prints when each part of a round begins and ends, in
microseconds from the round's start, the median of the rounds; and what launching the round's graph takes alone. The
watching adds less than a microsecond a line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import specstream.engine
from specstream import api
from specstream.attention_choice import KernelChoice
from specstream.bench_machine import choose_device
from specstream.bench_setup import bench_model, memory_options
from specstream.bench_steady import SteadyRounds
from specstream.cuda_executor import CudaExecutor
from specstream.engine import Engine
from specstream.mirror import Mirror
from specstream.next_round import NextRound
from specstream.speculator import Speculator

PARTS: tuple[tuple[type | ModuleType, str], ...] = (
    (Engine, "step"),
    (NextRound, "structure"),
    (specstream.engine, "round_batch"),
    (CudaExecutor, "run"),
    (CudaExecutor, "_launch"),
    (KernelChoice, "kernels"),
    (Mirror, "upload"),
    (CudaExecutor, "_repoint"),
    (torch.cuda.CUDAGraph, "replay"),
    (CudaExecutor, "_accept_and_draft"),
    (Speculator, "prepare"),
    (Speculator, "accept"),
    (CudaExecutor, "_work_ahead"),
    (Speculator, "settle"),
    (torch.cuda.Stream, "synchronize"),
    (Engine, "_commit"),
)
WARMUP = 20
Stamp = tuple[str, float]


def watched(owner: type | ModuleType, name: str, stamps: list[Stamp]) -> Any:
    """A method that notes when it begins and ends."""
    method = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        stamps.append((f"{owner.__name__}.{name}", time.perf_counter()))
        try:
            return method(*arguments, **named)
        finally:
            stamps.append((f"end of {owner.__name__}.{name}", time.perf_counter()))

    return mock.patch.object(owner, name, call)


def watch(steady: SteadyRounds, rounds: int) -> list[list[Stamp]]:
    """The stamps of each round that went as the last one did."""
    stamps: list[Stamp] = []
    seen = []
    patches = [watched(owner, name, stamps) for owner, name in PARTS]
    for patch in patches:
        patch.start()
    try:
        for _ in range(rounds):
            stamps.clear()
            steady.run()
            seen.append(list(stamps))
    finally:
        mock.patch.stopall()
    names = [[name for name, _ in one] for one in seen]
    return [one for one, of in zip(seen, names, strict=True) if of == names[-1]]


def report(seen: list[list[Stamp]]) -> None:
    before = 0.0
    for index, (name, _) in enumerate(seen[-1]):
        at = statistics.median((one[index][1] - one[0][1]) * 1e6 for one in seen)
        print(f"{at:>9.1f} {at - before:>+9.1f}  {name}")
        before = at


def replay_us(graph: Any) -> tuple[float, float]:
    """Microseconds of the host until a replay is launched, and of the device until it is done."""
    launches, times = [], []
    for _ in range(WARMUP):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begun = time.perf_counter()
        graph.replay()
        launches.append((time.perf_counter() - begun) * 1e6)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(launches), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens (1024)")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    target = bench_model(given.target, given.context, torch.bfloat16, choose_device("auto"))
    options = {"num_speculative_tokens": 1, "max_model_len": given.context, "max_num_seqs": 1}
    with closing(api.compile(target.module, None, **memory_options(target, options, resident=1.0))) as engine:
        steady = SteadyRounds(engine, 1, given.context - 3, queries=1, commit_every=0)
        times = [steady.run().ms for _ in range(WARMUP + given.rounds)][WARMUP:]
        print(f"a round {statistics.median(times) * 1e3:.1f} us (least {min(times) * 1e3:.1f})")
        graphs: list[Any] = list(getattr(engine._executor, "_graphs", {}).values())
        if graphs:
            launch, device = replay_us(graphs[-1].graph)
            print(f"its graph alone: {launch:.1f} us to launch, {device:.1f} us until it is done")
        report(watch(steady, given.rounds))


if __name__ == "__main__":
    main()
