"""The time on a device, written by a kernel behind others on a stream, inside a graph too."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


def stamp(times: Tensor, index: int) -> None:
    """Writes the device's time, in nanoseconds, to `times` [N], int64, when the current stream gets there."""
    _stamp_kernel[(1,)](times, index, num_warps=1)


@triton.jit(do_not_specialize=["index"])
def _stamp_kernel(times: tl.tensor, index: tl.tensor) -> None:
    tl.store(times + index, globaltimer())
