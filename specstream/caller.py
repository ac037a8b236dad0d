"""Warnings that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings

from specstream.errors import SpecStreamWarning

BETWEEN = ("specstream", "transformers", "torch")
"""Packages in which no caller's line is: transformers may call an engine for him."""


def warn_caller(text: str) -> None:
    """Warns as if the caller's own line had done so: Python shows a warning once for each line it comes from."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SpecStreamWarning, stacklevel=level)
