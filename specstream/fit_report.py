"""What `specstream.plan` says: whether it fits, what takes which memory, how fast it would be, what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specstream.bound_by import Bound
from specstream.cost import DeviceProfile
from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.round_plan import Plan


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by class, with all requests running; where they do not fit, of the least memory in which they would."""

    weights: int
    draft_weights: int
    draft_kv: int
    drawn_from: int
    """What candidates of requests that sample are drawn from."""
    ring: int
    tails: int
    """Of the requests that stream."""
    resident: int
    """Blocks for history that stays on the device."""
    prompt_buffer: int
    workspace: int
    """Work memory of rounds and prompts."""
    capacity: int | None
    """Of the device; None where it is the host."""
    host: int
    """KV in host memory."""
    host_budget: int | None
    """None: not known, since it is another machine's."""

    @property
    def device(self) -> int:
        """All that is planned on the device."""
        of_draft = self.draft_weights + self.draft_kv + self.drawn_from
        of_target = self.weights + self.ring + self.tails + self.resident
        return of_target + of_draft + self.prompt_buffer + self.workspace

    @property
    def left(self) -> int | None:
        """Of the device, for what its engine does not plan: torch and the driver."""
        return None if self.capacity is None else self.capacity - self.device

    @classmethod
    def of(cls, memory: MemoryPlan, tails: int, host: int, capacity: int | None, host_budget: int | None) -> MemoryUse:
        """`tails` are blocks."""
        chunk_bytes = memory.layout.chunk_bytes
        return cls(
            weights=memory.weights,
            draft_weights=memory.draft_weights,
            draft_kv=memory.draft_kv,
            drawn_from=memory.drawn_from,
            ring=memory.ring,
            tails=tails * chunk_bytes,
            resident=(memory.num_blocks - tails) * chunk_bytes,
            prompt_buffer=memory.prompt_buffer,
            workspace=memory.workspace,
            capacity=capacity,
            host=host,
            host_budget=host_budget,
        )


@dataclass(frozen=True)
class Shortage:
    """Bytes more, the least that would do; 0 where there are enough."""

    device: int = 0
    host: int = 0
    of_budget: bool = False
    """Whether what `gpu_kv_budget` allows of the device is short, or what it comes to by itself, and not the device's
    memory."""


@dataclass(frozen=True)
class RoundPrediction:
    """A round of all requests near the end of their context, among its like; in milliseconds."""

    round_ms: float
    """With cohorts one of the two that verify all requests."""
    rounds: int
    """That verify every request once."""
    link_floor_ms: float
    """What its streamed bytes take on the link alone."""
    streamed_bytes: int
    exposed_draft_ms: float
    hidden_draft_ms: float
    """With lookahead of a round whose outcome was foreseen; others take as many steps more, after acceptance."""
    foreseen: tuple[float, ...] | None
    """With lookahead: the chance that what becomes of the requests has been drafted for, at each acceptance that was
    asked for."""
    bound_by: Bound
    tokens_per_second: tuple[float, ...]
    """Of all requests together, at each acceptance that was asked for."""

    @property
    def link_utilization(self) -> float | None:
        """None: nothing streams."""
        return self.link_floor_ms / self.round_ms if self.streamed_bytes else None


@dataclass(frozen=True)
class FitReport:
    """The answer of `specstream.plan`."""

    target: str
    draft: str | None
    context: int
    batch: int
    acceptance: tuple[float, ...]
    """The chance that a candidate is right if those before it are: one, or the two ends of a range."""
    profile: DeviceProfile
    options: Options
    """With a policy and a number of candidates in place of "auto", if it fits."""
    reason: str | None
    """Why it does not fit; None if it does."""
    memory: MemoryUse | None
    """None: no memory suffices."""
    short: Shortage | None
    """Of which memory; None if it fits, or no memory suffices."""
    prediction: RoundPrediction | None
    """None if it does not fit."""
    plan: Plan | None
    """Of the round that is predicted."""
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What was done to a preset to reach so far."""
    max_context: int | None = None
    """If it was asked for: 0 if none fits."""
    max_batch: int | None = None
    min_gpu: str | None = None
    """If it was asked for: a listed device, or "none"."""

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def drafts(self) -> bool:
        """Whether candidates are proposed."""
        return self.draft is not None and self.options.drafting != "off"

    def __str__(self) -> str:
        """What the command shows."""
        from specstream.cli_plan import table_rows, title

        rows = table_rows(self)
        width = max(map(len, rows))
        return "\n".join([title(self), *(f"{name:<{width}}  {text}" for name, text in rows.items())])

    def figures(self) -> dict[str, Any]:
        """Everything but the plan's tasks, for JSON; times and rates are null where it does not fit."""
        known = asdict(self.prediction) if self.prediction else dict.fromkeys(RoundPrediction.__dataclass_fields__)
        known["link_utilization"] = self.prediction.link_utilization if self.prediction else None
        rates = known["tokens_per_second"]
        known["tokens_per_second"] = rates[0] if rates and len(rates) == 1 else rates
        acceptance = self.acceptance[0] if len(self.acceptance) == 1 else self.acceptance
        memory = None
        if self.memory is not None:
            memory = {**asdict(self.memory), "device": self.memory.device, "left": self.memory.left}
        asked = {name: getattr(self, name) for name in ("max_context", "max_batch", "min_gpu")}
        return {
            "target": self.target,
            "draft": self.draft,
            "device": self.profile.title,
            "context": self.context,
            "batch": self.batch,
            "acceptance": acceptance if self.drafts else None,
            "fits": self.fits,
            "reason": self.reason,
            "short": asdict(self.short) if self.short is not None else None,
            "memory": memory,
            **known,
            "advice": self.advice,
            "notes": self.notes,
            "options": asdict(self.options),
            **{name: value for name, value in asked.items() if value is not None},
        }
