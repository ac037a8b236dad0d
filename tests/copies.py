"""Copies between the tiers that are slow on purpose, and what tests of streaming ask of an engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from specstream.engine import Engine
from specstream.kv import SequenceKV
from tests.helpers import Request, cpu_executor, reference

NEW_TOKENS = 24


@dataclass
class Copies:
    """Copies between the tiers that take the time they are told to, and are counted."""

    to_device: Callable[[], float] = lambda: 0.0
    to_host: Callable[[], float] = lambda: 0.0
    engine: Engine | None = None
    host_blocks: Counter[int] = field(default_factory=Counter)
    """How often each host address was written."""
    fetched: int = 0
    offloaded: int = 0

    def __call__(self, destination: Tensor, source: Tensor) -> None:
        assert self.engine is not None
        ring = self.engine._executor.store.ring.untyped_storage().data_ptr()
        fetch = destination.untyped_storage().data_ptr() == ring
        if seconds := self.to_device() if fetch else self.to_host():
            time.sleep(seconds)
        destination.copy_(source)
        if fetch:
            self.fetched += source.nbytes
        else:
            self.offloaded += source.nbytes
            self.host_blocks.update(block.data_ptr() for block in destination)

    def watch(self, engine: Engine) -> Engine:
        self.engine = engine
        cpu_executor(engine)._copy = self
        return engine


def running_kv(engine: Engine) -> list[SequenceKV]:
    return [sequence.kv for sequence in engine._scheduler.running if sequence.kv is not None]


def assert_exact(target: nn.Module, *requests: Request) -> None:
    for request in requests:
        assert request.tokens == reference(target, request.prompt, NEW_TOKENS).tokens[: request.max_new_tokens]
