"""Exact long-context decoding with the KV cache in host memory: `specstream.compile(target, draft)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specstream.api import compile
    from specstream.engine import Engine
    from specstream.errors import (
        EngineBusy,
        EngineClosed,
        InvalidDistribution,
        InvalidOption,
        InvalidPlan,
        MissingExtra,
        OutOfBudget,
        SpecStreamError,
        SpecStreamWarning,
        UnsupportedModel,
    )
    from specstream.fit import plan
    from specstream.fit_report import FitReport
    from specstream.options import Options
    from specstream.outputs import RequestOutput, StepOutput

_HOMES = {
    "compile": "api",
    "plan": "fit",
    "FitReport": "fit_report",
    "Engine": "engine",
    "RequestOutput": "outputs",
    "StepOutput": "outputs",
    "Options": "options",
    "SpecStreamError": "errors",
    "SpecStreamWarning": "errors",
    "UnsupportedModel": "errors",
    "InvalidOption": "errors",
    "InvalidDistribution": "errors",
    "InvalidPlan": "errors",
    "MissingExtra": "errors",
    "OutOfBudget": "errors",
    "EngineBusy": "errors",
    "EngineClosed": "errors",
}

__all__ = [
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "FitReport",
    "InvalidDistribution",
    "InvalidOption",
    "InvalidPlan",
    "MissingExtra",
    "Options",
    "OutOfBudget",
    "RequestOutput",
    "SpecStreamError",
    "SpecStreamWarning",
    "StepOutput",
    "UnsupportedModel",
    "compile",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: torch takes seconds, and the command line's help needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specstream' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"specstream.{_HOMES[name]}"), name)
