"""What settings are tuned for: how many requests, how long, and how often a candidate is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specstream.errors import InvalidOption
from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.rehearsal import rehearse
from specstream.speculate import ASSUMED_ACCEPTANCE

LEAST_CONTEXT = 16
"""Tokens: half of them are new, and there is to be a history."""


@dataclass(frozen=True)
class Workload:
    """Requests of one length that run together."""

    context: int
    """Tokens of each, output included."""
    batch: int
    acceptance: float
    """The chance that a candidate is right if those before it are."""

    @classmethod
    def of(cls, options: Options, memory: MemoryPlan, context: Any, batch: Any, acceptance: Any) -> Workload:
        """As asked for; None: what an engine has room for, and an acceptance that is assumed.

        Raises:
            InvalidOption: more than it has room for, or no such number.
        """
        most = {"context": memory.max_model_len, "batch": options.max_num_seqs}
        limits = {"context": "max_model_len", "batch": "max_num_seqs"}
        found = {}
        for name, value in {"context": context, "batch": batch}.items():
            least = LEAST_CONTEXT if name == "context" else 1
            chosen = most[name] if value is None else value
            if most[name] < least:
                raise InvalidOption(limits[name], most[name], f"at least {least}, for an engine that is tuned")
            if isinstance(chosen, bool) or not isinstance(chosen, int) or not least <= chosen <= most[name]:
                allowed = f"an integer from {least} to {most[name]}, the engine's {limits[name]}"
                raise InvalidOption(name, value, allowed, f"Compile with a larger {limits[name]} for more.")
            found[name] = chosen
        running = rehearse(replace(memory, max_model_len=found["context"]), found["batch"]).running
        if running < found["batch"]:
            allowed = f"at most {running}: there is memory for no more of {found['context']} tokens at a time"
            raise InvalidOption("batch", found["batch"], allowed, "A larger gpu_kv_budget or host_kv_budget has room.")
        acceptance = ASSUMED_ACCEPTANCE if acceptance is None else acceptance
        number = isinstance(acceptance, int | float) and not isinstance(acceptance, bool)
        if not number or not 0 <= acceptance <= 1:
            allowed = "a number from 0 to 1: the chance that a candidate is right if those before it are"
            raise InvalidOption("acceptance", acceptance, allowed)
        return cls(found["context"], found["batch"], float(acceptance))

    def __str__(self) -> str:
        return f"{self.batch} x {self.context} tokens, acceptance {self.acceptance:.3g}"
