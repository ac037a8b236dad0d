"""Warnings that point at the line outside of this package from which it was called."""

from __future__ import annotations

import sys
import warnings


def warn_caller(text: str) -> None:
    """Warns as if the caller's own line had done so: Python shows a warning once for each line it comes from."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "specstream":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
