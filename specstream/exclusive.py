"""One call of an engine at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from specstream.errors import EngineBusy

P = ParamSpec("P")
R = TypeVar("R")


class Exclusive:
    """An object that takes one call at a time, but for those that a call makes of the object itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        """The thread that a call is under way in."""
        self._calling_out = False

    @contextmanager
    def calling_out(self) -> Iterator[None]:
        """While it lasts, code of the caller's runs, or a round does: calls of the object are refused."""
        before = self._calling_out
        try:
            self._calling_out = True
            yield
        finally:
            self._calling_out = before


S = TypeVar("S", bound=Exclusive)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method refuse to run while another thread is in one of its object, or a callback is called by it.

    The lock is taken by `with`, which an interrupt cannot split, so that it is never left locked; a thread that comes
    between the question and the lock waits for it.

    Raises:
        EngineBusy: then.
    """

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        thread, owner = threading.get_ident(), self._owner
        if owner not in (None, thread) or (owner == thread and self._calling_out):
            raise EngineBusy
        with self._lock:
            try:
                self._owner = thread
                return method(self, *args, **kwargs)
            finally:
                self._owner = owner

    return guarded
