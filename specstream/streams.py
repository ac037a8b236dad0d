"""Streams and events of a CUDA device, with the types that torch leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_untyped: Any = torch.cuda


def new_stream(device: torch.device, *, high_priority: bool) -> torch.cuda.Stream:
    """A stream whose kernels start before, or after, those of streams of the other priority."""
    low, high = _untyped.Stream.priority_range()
    stream: torch.cuda.Stream = _untyped.Stream(device, priority=high if high_priority else low)
    return stream


class CurrentStream:
    """The current stream of a device. Torch's own way to it takes 10 us of the time between two rounds."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._latest: torch.cuda.Stream = torch.cuda.current_stream(device)

    @property
    def stream(self) -> torch.cuda.Stream:
        if self.address != self._latest.cuda_stream:
            self._latest = torch.cuda.current_stream(self._index)
        return self._latest

    @property
    def address(self) -> int:
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        return handle


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on a stream, between all that is before it on the device and all that is after it; None: on the CPU.

    For a matrix product a library keeps memory for each stream, 32 MiB on an H200: better one that is used anyway.
    """
    if stream is None:
        yield
        return
    torch.cuda.synchronize(stream.device)
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(stream.device)


def abandon_capture(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture in which something went wrong: a stream that is left capturing is lost."""
    with suppress(RuntimeError):
        graph.capture_end()


def new_event(*, timed: bool = False) -> torch.cuda.Event:
    """An event to be recorded; times can be taken between two that are `timed`."""
    event: torch.cuda.Event = _untyped.Event(enable_timing=timed)
    return event


def record(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """An event for what the stream has been given so far."""
    event = new_event(timed=timed)
    event.record(stream)
    return event


def new_gate(*, timed: bool = False) -> torch.cuda.Event:
    """An event that can be recorded inside a graph and waited for outside of it."""
    event: torch.cuda.Event = _untyped.Event(enable_timing=timed, external=True)
    return event
