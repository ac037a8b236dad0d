"""One call of an engine at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from specstream.errors import EngineBusy

P = ParamSpec("P")
R = TypeVar("R")


S = TypeVar("S", bound=Any)
"""An object with a reentrant lock `_lock`, its `_owner` (the thread that holds it, or None), and `_calling_out`, true
while a round or code of the caller's runs, and its state must not be touched."""


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
