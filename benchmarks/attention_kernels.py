"""Time and KV bandwidth of the attention kernels on a CUDA device: one layer, attend and merge, replayed from a graph.

    python benchmarks/attention_kernels.py [--shape 8x32768x5] [--sweep] [--json FILE]

Qwen3-8B's shape in bfloat16: 8 KV heads of 128, 4 query heads each, blocks of 256 tokens. Successive layers use
different blocks, so that none finds its keys in the cache. `of copy` compares with a copy on the device, which moves
its bytes twice; in the JSON, `over_copy` is the most that a measured shape takes over what a copy would, 1 / `of copy`.
`--shape` measures seats x keys x rows alone, everything resident. `--sweep` also tries other tilings and prints the
fastest five beside the one that is chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from specstream.kernels.attention import AttentionState
from specstream.kernels.tiling import MAX_SPLITS, Tiling, choose_tiling
from specstream.kernels.triton_attend import OwnRows, Seats, attend
from specstream.kernels.triton_merge import merge
from specstream.rates import device_copy_bandwidth

KV_HEADS, GROUP, HEAD_DIM, TOKENS = 8, 4, 128, 256
DTYPE = torch.bfloat16
KEY_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


@dataclass(frozen=True)
class Shape:
    """One launch: so many seats, each with so many keys and rows."""

    seats: int
    keys: int
    rows: int
    resident: bool = True
    """All keys at once, with the own rows; else a streamed group. Merged are the parts of this one launch."""

    def __str__(self) -> str:
        keys = f"{self.keys // 1024}K" if self.keys >= 1024 else str(self.keys)
        return f"{self.seats} x {keys} keys, {self.rows} rows" + ("" if self.resident else ", group")


SHAPES = (
    Shape(8, 32768, 5),
    Shape(8, 32768, 1),
    Shape(8, 32768, 33),
    Shape(1, 32768, 5),
    Shape(1, 32768, 128),
    Shape(8, 1024, 5),
    Shape(1, 1024, 1),
    Shape(1, 4096, 1, resident=False),
    Shape(1, 4096, 5, resident=False),
    Shape(1, 4096, 33, resident=False),
    Shape(8, 4096, 33, resident=False),
)
SWEPT = (Shape(8, 32768, 5), Shape(1, 32768, 5), Shape(1, 1024, 1), Shape(8, 32768, 33), Shape(1, 4096, 5, False))
SWEPT_SIZES = ((32, 4, 3), (32, 4, 4), (64, 4, 3), (64, 4, 4), (64, 8, 3), (64, 8, 4), (128, 4, 3), (128, 8, 3))
"""block_keys, num_warps and num_stages."""


class Layers:
    """The tensors of one shape, for so many layers that their keys exceed the cache several times."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.count = max(1, min(64, (512 << 20) // (shape.seats * shape.keys * KEY_BYTES)))
        device, rows = "cuda", shape.seats * shape.rows
        blocks = shape.seats * -(-shape.keys // TOKENS)
        self.kv = torch.empty(
            (self.count * blocks + 2 * shape.seats, 2, KV_HEADS, TOKENS, HEAD_DIM), dtype=DTYPE, device=device
        ).normal_()
        start = torch.arange(shape.seats, dtype=torch.int32, device=device) * shape.rows
        lengths = torch.full_like(start, shape.keys)
        order = torch.randperm(self.count * blocks, device=device).to(torch.int32)
        self.seats = [
            Seats(start, torch.full_like(start, shape.rows), table.view(shape.seats, -1), lengths, start * 0)
            for table in order.view(self.count, blocks)
        ]
        self.query = torch.randn(rows, KV_HEADS * GROUP, HEAD_DIM, dtype=DTYPE, device=device).transpose(0, 1)
        self.out = torch.empty_like(self.query)
        self.own: OwnRows | None = None
        if shape.resident:
            key, value = torch.randn(2, rows, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device).transpose(1, 2).unbind(0)
            spare = torch.arange(2 * shape.seats, dtype=torch.int32, device=device) + self.count * blocks
            ancestors = torch.full((rows, 2), -1, dtype=torch.int64, device=device)
            self.own = OwnRows(key, value, ancestors, lengths, spare.view(shape.seats, 2))

    def chosen(self) -> Tiling:
        shape = self.shape
        return choose_tiling(shape.seats, KV_HEADS, GROUP, shape.rows, shape.keys, HEAD_DIM, DTYPE)

    def microseconds(self, tiling: Tiling, merged: bool = True) -> float:
        """The median time of one layer."""
        parts_shape = (tiling.splits + (self.own is not None), *self.query.shape[:2])
        parts = AttentionState(
            torch.zeros((*parts_shape, HEAD_DIM), device="cuda"), torch.zeros(parts_shape, device="cuda")
        )
        counts = torch.full_like(self.seats[0].row_count, len(parts.out))

        def run() -> None:
            for seats in self.seats:
                attend(self.query, self.kv, seats, HEAD_DIM**-0.5, tiling, parts, self.own)
                if merged:
                    merge(parts, seats, counts, self.out)

        return replayed(run) / self.count


def replayed(run: Callable[[], None], repeats: int = 20) -> float:
    """The median microseconds of `run` as a CUDA graph."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for repeat in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure(layers: Layers, tiling: Tiling, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    shape = layers.shape
    together, alone = layers.microseconds(tiling), layers.microseconds(tiling, merged=False)
    rate = shape.seats * shape.keys * KEY_BYTES / together * 1e6
    figures = {"us": together, "attend_us": alone, "TB_s": rate / 1e12, "of_copy": rate / bandwidth}
    return {"shape": str(shape), **figures, "tiling": asdict(tiling)}


def candidates(chosen: Tiling) -> list[Tiling]:
    """Tilings around the chosen one."""
    packed = chosen.block_rows * chosen.row_tiles
    tilings = [chosen]
    several = sorted({max(1, min(MAX_SPLITS, chosen.splits * n // 2)) for n in (1, 2, 3, 4, 8, 16)})
    for (keys, warps, stages), splits in product(SWEPT_SIZES, several):
        tilings.append(replace(chosen, block_keys=keys, num_warps=warps, num_stages=stages, splits=splits))
    if chosen.row_tiles > 1:
        wide = replace(chosen, block_rows=128, row_tiles=-(-packed // 128), num_warps=8)
        tilings += [replace(wide, block_keys=keys, num_stages=n) for keys, n in product((64, 128), (2, 3))]
    return tilings


def sweep(layers: Layers, bandwidth: float) -> list[dict[str, Any]]:
    """The fastest five tilings, and the chosen one first."""
    timed = []
    for tiling in candidates(layers.chosen()):
        try:
            timed.append((layers.microseconds(tiling), tiling))
        except OutOfResources:  # more shared memory than there is
            continue
    best = sorted(timed[1:], key=lambda pair: pair[0])[:5]
    return [measure(layers, tiling, bandwidth) for _, tiling in timed[:1] + best]


def asked_shape(text: str) -> Shape:
    """A shape from "8x32768x5"."""
    try:
        seats, keys, rows = (int(number) for number in text.split("x"))
        return Shape(seats, keys, rows)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape like 8x32768x5: seats x keys x rows") from None


def line(row: dict[str, Any]) -> str:
    tiling = row["tiling"]
    sizes = "{block_rows}x{row_tiles} rows, {block_keys} keys, {splits} splits, {num_warps} warps, {num_stages} stages"
    figures = "{shape:<26} {us:>8.1f} {attend_us:>8.1f} {TB_s:>6.2f} {of_copy:>8.2f}"
    return f"{figures.format(**row)}  {sizes.format(**tiling)}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=asked_shape, action="append", help="seats x keys x rows (several)")
    parser.add_argument("--sweep", action="store_true", help="also try other tilings of some shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    bandwidth = device_copy_bandwidth(torch.device("cuda"))
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    header = f"{'':<26} {'us':>8} {'attend':>8} {'TB/s':>6} {'of copy':>8}  tiling"
    print(header)
    rows, swept = [], []
    for shape in arguments.shape or SHAPES:
        layers = Layers(shape)
        rows.append(measure(layers, layers.chosen(), bandwidth))
        print(line(rows[-1]), flush=True)
    if arguments.sweep:
        for shape in SWEPT:
            print("\nchosen, then the fastest\n" + header)
            found = sweep(Layers(shape), bandwidth)
            print("\n".join(line(row) for row in found), flush=True)
            swept += found
    if arguments.json:
        figures: dict[str, object] = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
        figures |= {"copy_B_s": bandwidth, "over_copy": max(1 / row["of_copy"] for row in rows)}
        arguments.json.write_text(json.dumps({**figures, "rows": rows, "sweep": swept}))


if __name__ == "__main__":
    main()
