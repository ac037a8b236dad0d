"""How fast a device copies, multiplies and launches, measured while it is idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from specstream.pinned import Pinning
from specstream.recurring import GraphPool, Recurring
from specstream.streams import new_stream, on_stream

LINK_COPY_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
DEVICE_COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
MATRIX_ROWS = {"cuda": 8192, "cpu": 1024}
"""And columns."""
LAUNCHES = 1000
"""In a graph: the start of the graph itself is then no part of a launch worth mentioning."""
NORM_SHAPE = (8, 4096)
"""Rows of a verification, and their size."""
TIMES = 10
PLACES = 2
"""In host memory: to one of dozens the link was half as fast."""


def link_bandwidth(device: torch.device, size: int | None = None, *, to_host: bool = False) -> float:
    """Bytes a second of a copy one way between pinned host memory and the device; on a CPU, in its memory.

    Args:
        size: bytes of the copy; None: what is usual for a device of its kind.
    """
    size = LINK_COPY_BYTES[device.type] if size is None else size
    own, seconds = _zeros(size, device), list[float]()
    for _ in range(PLACES):
        host = Pinning((size,), torch.uint8, device).wait() if device.type == "cuda" else _zeros(size, device)
        source, target = (own, host) if to_host else (host, own)
        seconds.append(best_seconds(partial(target.copy_, source, non_blocking=True), device))
    return size / min(seconds)


def device_copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes read and written a second by a copy of so many bytes, or as many as is usual, in the device's memory."""
    size = DEVICE_COPY_BYTES[device.type] if size is None else size
    source, target = _zeros(size, device), _zeros(size, device)
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """Operations a second of the product of two square matrices."""
    # Random numbers: with zeros a device takes less power and is faster. A generator of their own: making an engine
    # leaves the caller's as they are.
    chance = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(rows, rows, dtype=dtype, device=device, generator=chance) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * rows**3 / best_seconds(lambda: torch.mm(left, right, out=product), device)


def launch_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """A small kernel's part of a graph of many that wait for each other; on a CPU there is no graph.

    They are norms, as a model's small kernels are: empty ones would show the wait between two kernels alone.
    """
    first = torch.ones(NORM_SHAPE, dtype=dtype, device=device)

    def norms() -> Tensor:
        rows = first
        for _ in range(LAUNCHES):
            rows = F.layer_norm(rows, NORM_SHAPE[-1:])
        return rows

    pool = GraphPool(new_stream(device, high_priority=True) if device.type == "cuda" else None)
    with on_stream(pool.stream):
        # The first call only compiles and the second one captures; the shortest is a replay.
        return best_seconds(Recurring(norms, pool), device) / LAUNCHES


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several times, by the device's own clock if it has one."""
    times: list[float] = []
    for _ in range(TIMES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                work()
                end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            work()
            times.append(time.perf_counter() - before)
    return min(times)


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
