"""Host memory that a device copies from and to at the link's full speed: exactly sized, pinned in the background."""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from specstream.errors import OutOfBudget
from specstream.options import format_size

SLICE_BYTES = 256 << 20
"""Memory is made present in slices of so many bytes: that takes longest, and progress is counted in it."""


class Pinning:
    """Uninitialised memory that a thread of its own makes present and registers as pinned.

    It is released when the tensor and all its views are gone. A pinned tensor of torch's own would round its size up
    to a power of two.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.total_bytes, self.present_bytes = prod(shape) * dtype.itemsize, 0
        self._cancelled = False
        self._memory: Future[Tensor] = Future()
        Thread(target=self._run, args=(shape, dtype, device), name="specstream-pinning", daemon=True).start()

    def wait(self) -> Tensor:
        """The memory, when it is there; until then a terminal shows how far it is. An interrupt leaves it under way.

        Raises:
            OutOfBudget: the driver refuses to pin so much.
        """
        console = Console(stderr=True)
        columns = TextColumn("pinning host memory"), BarColumn(), DownloadColumn(binary_units=True)
        with Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("", total=self.total_bytes)
            while True:
                with suppress(NotYet):
                    return self._memory.result(timeout=0.1)
                bar.update(task, completed=self.present_bytes)

    def cancel(self) -> None:
        """Gives the memory up, if nobody has it yet."""
        self._cancelled = True

    def _run(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        try:
            _stay_near(device)
            memory = mmap.mmap(-1, self.total_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for start in range(0, self.total_bytes, SLICE_BYTES):
                if self._cancelled:
                    return
                part = whole[start : start + SLICE_BYTES]
                part.zero_()  # by all threads, where the driver would do it alone
                self.present_bytes += len(part)
            _register(whole, memory)
            self._memory.set_result(whole.view(dtype).view(shape))
        except BaseException as error:  # for who waits
            self._memory.set_exception(error)


def _register(whole: Tensor, memory: mmap.mmap) -> None:
    """Pins memory until the storage of `whole` is gone."""
    address = whole.data_ptr()
    status = _runtime().cudaHostRegister(address, whole.nbytes, 0)
    if int(status) != 0:
        raise OutOfBudget(
            f"the driver does not pin {format_size(whole.nbytes)} of host memory ({status}); lower host_kv_budget or "
            f"max_model_len, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(whole.untyped_storage(), _unregister, address, memory)


def _unregister(address: int, memory: mmap.mmap) -> None:
    """Called with the mapping as an argument, so that it outlives the registration."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    untyped: Any = torch.cuda
    return untyped.cudart()


def _stay_near(device: torch.device) -> None:
    """Makes the device the calling thread's, and keeps it on the processors beside it, where memory is then taken.

    So with the threads that it starts; where the system does not say which processors those are, they stay free.
    """
    torch.cuda.set_device(device.index or 0)
    properties: Any = torch.cuda.get_device_properties(device)
    ids = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    with suppress(OSError, ValueError, AttributeError):
        text = Path("/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0/local_cpulist".format(*ids)).read_text("utf-8")
        near = processors(text) & os.sched_getaffinity(0)
        os.sched_setaffinity(0, near or os.sched_getaffinity(0))


def processors(text: str) -> set[int]:
    """Numbers in the form of Linux' lists, such as 0-3,8."""
    ends = [part.split("-") for part in text.strip().split(",")]
    return {number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)}
