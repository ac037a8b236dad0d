"""Time of linear maps of few rows on a CUDA device, by Triton kernels and by torch, replayed from a graph.

    python benchmarks/linear_kernels.py [--rows 1 8 16 32 64] [--sweep]

The shapes are those of Qwen3-8B and Qwen3-0.6B in bfloat16, maps of one input as one call, gate and up also with the
activation (SwiGLU); successive calls use other weights, so that none finds its own in the cache. `floor` is what
reading the weights takes at the rate of a copy on the device. `--sweep` also prints the fastest of other tilings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from specstream.kernels.triton_linear import LinearTiling, choose_linear_tiling, few_row_linears
from specstream.kernels.triton_swiglu import few_row_swiglu
from specstream.rates import device_copy_bandwidth

Map = Callable[[Tensor, list[Tensor]], object]

SHAPES = {
    "8B q, k, v": (4096, (4096, 1024, 1024)),
    "8B out": (4096, (4096,)),
    "8B gate, up": (4096, (12288, 12288)),
    "8B SwiGLU": (4096, (12288, 12288)),
    "8B down": (12288, (4096,)),
    "8B head": (4096, (151936,)),
    "0.6B q, k, v": (1024, (2048, 1024, 1024)),
    "0.6B out": (2048, (1024,)),
    "0.6B gate, up": (1024, (3072, 3072)),
    "0.6B SwiGLU": (1024, (3072, 3072)),
    "0.6B down": (3072, (1024,)),
}


def microseconds(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """The least time of a call, of several replays of all of them as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return min(times)


def torch_linears(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, weight) for weight in weights]


def torch_swiglu(x: Tensor, weights: list[Tensor]) -> Tensor:
    gate, up = torch_linears(x, weights)
    return F.silu(gate) * up


def tilings(rows: int) -> Iterator[LinearTiling]:
    """Some that a device may take."""
    block_rows = choose_linear_tiling(rows, 1, 64, 2).block_rows
    for out, inner, stages in product((8, 16, 32, 64), (64, 128, 256, 512), (2, 3, 4, 5)):
        if 2048 <= out * inner <= 16384 and (out + block_rows) * inner * 2 * stages < 200 << 10:
            yield LinearTiling(block_rows, out, inner, stages)


def best_tiling(call: Map, x: Tensor, all_weights: list[list[Tensor]]) -> tuple[float, LinearTiling]:
    """The least time of a call, and its tiling."""
    found = []
    for tiling in tilings(len(x)):
        if call is few_row_swiglu and tiling.block_out < 16:  # 8 outputs of each weight
            continue
        with patch.object(sys.modules[call.__module__], "choose_linear_tiling", lambda *_, tiling=tiling, **__: tiling):
            try:
                found.append((microseconds([lambda w=w: call(x, w) for w in all_weights], 3), tiling))
            except OutOfResources:  # more shared memory than there is
                continue
    return min(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--sweep", action="store_true", help="also try other tilings")
    arguments = parser.parse_args()
    bandwidth = device_copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'':<14} {'rows':>4} {'floor us':>9} {'ours':>7} {'torch':>7}")
    for name, (inputs, outputs) in SHAPES.items():
        count = max(2, min(40, (1 << 30) // (inputs * sum(outputs))))
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        call, by_torch = (few_row_swiglu, torch_swiglu) if "SwiGLU" in name else (few_row_linears, torch_linears)
        all_weights = [[torch.randn(n, inputs, **options) for n in outputs] for _ in range(count)]
        for rows in arguments.rows:
            x = torch.randn(rows, inputs, **options)
            floor = 2 * inputs * sum(outputs) / bandwidth * 1e6
            ours = microseconds([lambda w=w, x=x, f=call: f(x, w) for w in all_weights])
            torchs = microseconds([lambda w=w, x=x, f=by_torch: f(x, w) for w in all_weights])
            print(f"{name:<14} {rows:>4} {floor:>9.1f} {ours:>7.1f} {torchs:>7.1f}", flush=True)
            if arguments.sweep:
                print(f"{'':<14} best: {best_tiling(call, x, all_weights)}", flush=True)


if __name__ == "__main__":
    main()
