"""Host memory that a device copies from and to at the link's full speed: exactly sized, and registered as pinned."""

from __future__ import annotations

import mmap
import weakref
from math import prod
from typing import Any

import torch
from torch import Tensor

from specstream.errors import OutOfBudget
from specstream.options import format_size


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised pinned memory, released when the tensor and all its views are gone.

    A pinned tensor of torch's own would round its size up to a power of two.

    Raises:
        OutOfBudget: the driver refuses to pin so much.
    """
    size = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    address = whole.data_ptr()
    status = _runtime().cudaHostRegister(address, size, 0)
    if int(status) != 0:
        raise OutOfBudget(
            f"the driver does not pin {format_size(size)} of host memory ({status}); lower host_kv_budget or "
            f"max_model_len, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(whole.untyped_storage(), _unregister, address, memory)
    return whole.view(dtype).view(shape)


def _unregister(address: int, memory: mmap.mmap) -> None:
    """Called with the mapping as an argument, so that it outlives the registration."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    untyped: Any = torch.cuda
    return untyped.cudart()
