"""Work in pieces: a generator that yields wherever it may be left for a while, and returns what comes of it.

The host plans while a device computes. A whole plan takes longer than a short round, and whoever cannot leave it keeps
the device waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]
AT_ONCE = 32
"""Small pieces, each about one task, between two moments at which planning may be left."""


def finish(work: Pieces[Result]) -> Result:
    """Does all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def in_larger_pieces(work: Pieces[Result], size: int = AT_ONCE) -> Pieces[Result]:
    """The same, which may be left only after every so many of its pieces."""
    while True:
        for _ in range(size):
            try:
                next(work)
            except StopIteration as end:
                result: Result = end.value
                return result
        yield


def timed(work: Pieces[Result]) -> Pieces[tuple[Result, float]]:
    """The same, with how many seconds it took, without what was done in between."""
    seconds = 0.0
    while True:
        start = time.perf_counter()
        try:
            next(work)
        except StopIteration as end:
            return end.value, seconds + time.perf_counter() - start
        seconds += time.perf_counter() - start
        yield


@dataclass
class Unfinished:
    """Work that goes on where it was left when it is asked for again, unless other work was begun meanwhile."""

    _begun: tuple[Hashable, Iterator[None]] | None = field(default=None, init=False)

    def pieces(self, of: Hashable, begin: Callable[[], Iterator[None]]) -> Iterator[None]:
        """The work of that name, or what is left of it."""
        rest = self._begun[1] if self._begun is not None and self._begun[0] == of else begin()
        self._begun = None  # what fails or is interrupted is begun anew
        for _ in rest:
            self._begun = of, rest
            yield
            self._begun = None
