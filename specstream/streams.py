"""Streams and events of a CUDA device, with the types that torch leaves out."""

from __future__ import annotations

from typing import Any

import torch

_untyped: Any = torch.cuda


def new_stream(device: torch.device, *, high_priority: bool) -> torch.cuda.Stream:
    """A stream whose kernels start before, or after, those of streams of the other priority."""
    low, high = _untyped.Stream.priority_range()
    stream: torch.cuda.Stream = _untyped.Stream(device, priority=high if high_priority else low)
    return stream


def record(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """An event for what the stream has been given so far; times can be taken between two that are `timed`."""
    event: torch.cuda.Event = _untyped.Event(enable_timing=timed)
    event.record(stream)
    return event


def new_gate() -> torch.cuda.Event:
    """An event that can be recorded inside a graph and waited for outside of it."""
    event: torch.cuda.Event = _untyped.Event(external=True)
    return event
