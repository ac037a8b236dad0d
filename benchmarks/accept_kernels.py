"""What choosing tokens on the device costs: microseconds a call, replayed in a CUDA graph.

    python benchmarks/accept_kernels.py [--vocab 151936] [--json]

Needs a CUDA device. A draft step is `process` and `propose` on a row for each seat; a verification is `process` and
`accept` on a row for each candidate of a seat and one more. A figure is the least of several replays of many calls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from specstream.kernels.accept import Seats, accept, propose
from specstream.kernels.process import process

CALLS, REPLAYS = 20, 10

METHODS: tuple[tuple[str, Literal["standard", "coupled"], bool], ...] = (
    ("greedy", "coupled", False),
    ("coupled", "coupled", True),
    ("standard", "standard", True),
)


def microseconds(call: Callable[[], object]) -> float:
    """The time of a call in a graph of `CALLS`, the least of `REPLAYS` replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return min(times)


def settings_of(rows: int) -> dict[str, dict[str, Tensor]]:
    """Sets of settings for `process`, by name."""
    temperature = torch.full((rows,), 0.7, device="cuda")
    top_k = torch.full((rows,), 50, dtype=torch.int32, device="cuda")
    top_p = torch.full((rows,), 0.9, dtype=torch.float64, device="cuda")
    min_p = torch.full((rows,), 0.05, device="cuda")
    return {
        "temperature": {"temperature": temperature},
        "temperature, min_p": {"temperature": temperature, "min_p": min_p},
        "temperature, top_k": {"temperature": temperature, "top_k": top_k},
        "temperature, top_p": {"temperature": temperature, "top_p": top_p},
        "temperature, top_k, top_p": {"temperature": temperature, "top_k": top_k, "top_p": top_p},
    }


def seats_of(count: int, depth: int, vocab: int, do_sample: bool) -> Seats:
    """Seats with random candidates."""
    return Seats(
        candidates_count=torch.full((count,), depth, dtype=torch.int32, device="cuda"),
        candidates=torch.randint(vocab, (count, depth), device="cuda"),
        positions=torch.randint(100_000, (count,), device="cuda"),
        seeds=torch.randint(2**62, (count,), device="cuda"),
        do_sample=torch.full((count,), do_sample, device="cuda"),
    )


def measure_rows(rows: int, vocab: int) -> dict[str, float]:
    """`process` on so many rows."""
    logits = (torch.randn(rows, vocab, device="cuda") * 3).bfloat16()
    return {
        f"process, {rows} rows: {name}": microseconds(partial(process, logits, **settings))
        for name, settings in settings_of(rows).items()
    }


def measure_seats(count: int, depth: int, vocab: int) -> dict[str, float]:
    """`propose`, and `accept` with `depth` candidates for each seat."""
    figures: dict[str, float] = {}
    rows = count * (depth + 1)
    scores = torch.randn(rows, vocab, device="cuda") * 3
    row_start = torch.arange(0, rows, depth + 1, dtype=torch.int32, device="cuda")
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    draft = torch.softmax(torch.randn(count, depth, vocab, dtype=torch.float64, device="cuda") * 3, -1)
    for name, method, do_sample in METHODS:
        seats = seats_of(count, depth, vocab, do_sample)
        probabilities = draft if method == "standard" else None
        step = partial(propose, seats, scores[:count], first, method, "probabilistic", probabilities)
        verification = partial(accept, seats, scores, row_start, method, probabilities)
        figures[f"propose, {count} seats: {name}"] = microseconds(step)
        figures[f"accept, {count} seats, {depth} candidates: {name}"] = microseconds(verification)
    return figures


def measure(vocab: int) -> dict[str, float]:
    """Microseconds a call, by what is called."""
    figures: dict[str, float] = {}
    for count in (1, 8):
        for depth in (4, 16):
            figures |= measure_seats(count, depth, vocab)
    for rows in (1, 5, 8, 17, 40, 136):  # a draft step's and a verification's, for 1 and 8 seats
        figures |= measure_rows(rows, vocab)
    return dict(sorted(figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    figures = measure(arguments.vocab)
    if arguments.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "vocab": arguments.vocab, "us": figures}))
        return
    print(f"{torch.cuda.get_device_name()}, vocabulary of {arguments.vocab}")
    for name, value in figures.items():
        print(f"{name:<64} {value:8.1f} us")


if __name__ == "__main__":
    main()
