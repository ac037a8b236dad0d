"""Draft steps: work that launches the same kernels on the same buffers every time, a CUDA graph from the second on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from specstream.streams import abandon_capture

Result = TypeVar("Result")


class GraphPool:
    """Graphs that run one after the other: they share their memory and the stream on which they are captured."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """`stream` is None on the CPU: there nothing is captured. Kernels of a graph have its priority, not that of the
        stream on which they are launched."""
        self.stream = stream
        self._latest: torch.cuda.CUDAGraph | None = None
        """It keeps the memory that graphs share."""

    def capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of what `work` launches, and what it returned: tensors that every replay writes anew, and that the
        replay of another graph may overwrite.

        Nothing runs, and nobody waits: the device goes on with what it was given.
        """
        graph, pool = torch.cuda.CUDAGraph(), None if self._latest is None else self._latest.pool()
        with torch.cuda.stream(self.stream):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                result = work()
            except BaseException:
                abandon_capture(graph)
                raise
            graph.capture_end()
        self._latest = graph
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
        self._compiled = self.pool.stream is not None
        return result
