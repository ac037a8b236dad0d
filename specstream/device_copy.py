"""Copies between pinned host memory and a device, launched or captured on a stream, and re-pointed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Transfer:
    """One copy of `size` bytes between two addresses."""

    destination: int
    source: int
    size: int
    to_device: bool

    @property
    def _kind(self) -> Any:
        from cuda.bindings import runtime

        kinds = runtime.cudaMemcpyKind
        return kinds.cudaMemcpyHostToDevice if self.to_device else kinds.cudaMemcpyDeviceToHost

    def launch(self, stream: int) -> None:
        """Puts the copy on the stream at an address, or into the graph that the stream is capturing."""
        from cuda.bindings import runtime

        arguments = self.destination, self.source, self.size, self._kind, stream
        _check(runtime.cudaMemcpyAsync(*arguments))

    def repoint(self, graph: int, node: Any) -> None:
        """Makes a captured copy this one, in all later launches of an instantiated graph."""
        from cuda.bindings import runtime

        arguments = self.destination, self.source, self.size, self._kind
        _check(runtime.cudaGraphExecMemcpyNodeSetParams1D(graph, node, *arguments))


def latest_node(stream: torch.cuda.Stream) -> Any:
    """The node that the last call put into the graph which the stream is capturing."""
    from cuda.bindings import runtime

    answer = runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)
    _check(answer)
    return answer[4][0]


def _check(answer: tuple[Any, ...]) -> None:
    if int(answer[0]) != 0:
        raise RuntimeError(f"CUDA: {answer[0]!r}")
