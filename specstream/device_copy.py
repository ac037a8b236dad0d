"""Copies between pinned host memory and a device, launched or captured on a stream, and re-pointed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Transfer:
    """One copy of `size` bytes between two addresses."""

    destination: int
    source: int
    size: int
    to_device: bool

    def launch(self, stream: int) -> None:
        """Puts the copy on the stream at an address, or into the graph that the stream is capturing."""
        arguments = self.destination, self.source, self.size, _kinds()[self.to_device], stream
        _check(_runtime().cudaMemcpyAsync(*arguments))

    def repoint(self, graph: int, node: Any) -> None:
        """Makes a captured copy this one, in all later launches of an instantiated graph."""
        arguments = self.destination, self.source, self.size, _kinds()[self.to_device]
        _check(_runtime().cudaGraphExecMemcpyNodeSetParams1D(graph, node, *arguments))


def latest_node(stream: torch.cuda.Stream) -> Any:
    """The node that the last call put into the graph which the stream is capturing."""
    answer = _runtime().cudaStreamGetCaptureInfo(stream.cuda_stream)
    _check(answer)
    return answer[4][0]


@cache
def _runtime() -> Any:
    """The CUDA runtime, which machines without a device need not have."""
    from cuda.bindings import runtime

    return runtime


@cache
def _kinds() -> tuple[Any, Any]:
    """What a copy is: to the host, and to a device."""
    kinds = _runtime().cudaMemcpyKind
    return kinds.cudaMemcpyDeviceToHost, kinds.cudaMemcpyHostToDevice


def _check(answer: tuple[Any, ...]) -> None:
    if int(answer[0]) != 0:
        raise RuntimeError(f"CUDA: {answer[0]!r}")
