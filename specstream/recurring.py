"""Draft steps: work that launches the same kernels on the same buffers every time, a CUDA graph from the second on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from specstream.streams import new_stream

Result = TypeVar("Result")


@dataclass
class Recurring(Generic[Result]):
    """Runs `work` the first time, which compiles its kernels; then captures it, and replays that. Not so on the CPU.

    Kernels of a graph have the priority of the stream that it was captured on, not of the one that it is launched on.
    These have the lower one, wherever they are captured: the target's come first.
    """

    work: Callable[[], Result]
    device: torch.device
    _compiled: bool = field(default=False, init=False)
    _graph: torch.cuda.CUDAGraph | None = field(default=None, init=False)
    _results: list[Result] = field(default_factory=list, init=False)
    """What the captured work has returned: tensors that every replay writes anew."""

    def __call__(self) -> Result:
        """On the current stream."""
        if self._graph is None and self._compiled:
            self._graph = self._captured()
        if self._graph is not None:
            self._graph.replay()
            return self._results[0]
        result = self.work()
        self._compiled = self.device.type == "cuda"
        return result

    def _captured(self) -> torch.cuda.CUDAGraph:
        torch.cuda.current_stream(self.device).synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = new_stream(self.device, high_priority=False)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = self.work()
        self._results = [result]
        return graph
