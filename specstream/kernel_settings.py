"""The settings of sampling that the kernels apply, read off a request's processors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specstream.sampling import Sampling

_IN_ORDER: tuple[tuple[type, str], ...] = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
"""Processors that the kernels stand for, in the order in which the kernels apply them."""


@dataclass(frozen=True)
class KernelSettings:
    """As `specstream.kernels.process.process` takes them; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: Sampling) -> KernelSettings | None:
        """None if a processor is none of the kernels', or stands in another order."""
        values: dict[str, Any] = {}
        left = iter(_IN_ORDER)
        for processor in sampling.processors:
            name = next((name for kind, name in left if kind is type(processor)), None)
            if name is None or not _is_plain(processor):
                return None
            values[name] = getattr(processor, name)
        if "top_k" in values:
            values["top_k"] = min(values["top_k"], 2**31 - 1)
        return cls(**values)

    @property
    def used(self) -> frozenset[str]:
        """Names of those that change something."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name) != field.default)


def _is_plain(processor: Any) -> bool:
    """Whether it removes by -inf and may leave a single token, as it does without further arguments."""
    removed, least = (getattr(processor, name, None) for name in ("filter_value", "min_tokens_to_keep"))
    return removed in (None, -float("inf")) and least in (None, 1)
