"""One call of an engine at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from specstream.errors import EngineBusy

P = ParamSpec("P")
R = TypeVar("R")


S = TypeVar("S", bound=Any)
"""An object with a reentrant lock `_lock`, and `_in_round`, true while its state must not be touched."""


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method refuse to run while another thread is in one of its object, or a callback is in a round.

    Raises:
        EngineBusy: then.
    """

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._lock.acquire(blocking=False):
            raise EngineBusy
        try:
            if self._in_round:
                raise EngineBusy
            return method(self, *args, **kwargs)
        finally:
            self._lock.release()

    return guarded
