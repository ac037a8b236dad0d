"""Draft steps: work that launches the same kernels on the same buffers every time, a CUDA graph from the second on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from specstream.streams import new_stream

Result = TypeVar("Result")


class GraphPool:
    """Graphs that run one after the other: they share their memory and the stream on which they are captured.

    Kernels of a graph have the priority of that stream, not of the one that it is launched on. These have the lower
    one: the target's come first. Libraries keep memory of their own for each stream, 32 MiB on an H200.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._handle: Any = None
        if device.type == "cuda":
            self._stream, self._handle = new_stream(device, high_priority=False), torch.cuda.graph_pool_handle()

    @property
    def captures(self) -> bool:
        """Not on the CPU."""
        return self._stream is not None

    def capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of what `work` launches, and what it returned: tensors that every replay writes anew, and that the
        replay of another graph may overwrite."""
        torch.cuda.current_stream(self.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph, result


@dataclass
class Recurring(Generic[Result]):
    """Runs `work` the first time, which compiles its kernels; then captures it, and replays that. Not so on the CPU."""

    work: Callable[[], Result]
    pool: GraphPool
    _compiled: bool = field(default=False, init=False)
    _captured: tuple[torch.cuda.CUDAGraph, Result] | None = field(default=None, init=False)

    def __call__(self) -> Result:
        """On the current stream."""
        if self._captured is None and self._compiled:
            self._captured = self.pool.capture(self.work)
        if self._captured is not None:
            graph, result = self._captured
            graph.replay()
            return result
        result = self.work()
        self._compiled = self.pool.captures
        return result
