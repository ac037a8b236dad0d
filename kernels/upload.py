"""Tables from pinned host memory, read by a kernel: a copy engine that brings histories may have no turn for them.

Copies to a device go through one engine, in whatever order it takes the streams in. While it is never without a large
copy of a stream of higher priority, a small one of another stream may wait until the link stands still, and with it all
that reads the tables.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Words that a program copies."""


def upload(here: Tensor, there: Tensor) -> None:
    """Copies `here` to `there`, on the current stream; the host may not write meanwhile.

    Args:
        here: int64 [words], in pinned memory.
        there: int64 [words], on the device.
    """
    words = len(here)
    _upload_kernel[(triton.cdiv(words, TILE),)](here, there, words, TILE=TILE)


@triton.jit(do_not_specialize=["words"])
def _upload_kernel(here: tl.tensor, there: tl.tensor, words: tl.tensor, TILE: tl.constexpr) -> None:
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(there + at, tl.load(here + at, mask=at < words), mask=at < words)
