"""A target and what drafts for it, captured once for engines of many settings; and rounds of such engines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from specstream import api
from specstream.bench_generate import start_requests
from specstream.bench_setup import BenchModel, bench_model, memory_options
from specstream.engine import Engine
from specstream.graph import PartitionedModel
from specstream.options import MOST_AUTO_CANDIDATES, SELF, Options
from specstream.speculate import ASSUMED_ACCEPTANCE

WARMUP = 8
"""Rounds: each kind occurs often enough to be replayed."""
DRAFT_WINDOW = 1024


@dataclass(frozen=True)
class BenchPair:
    """Two models of random weights, or one that drafts for itself."""

    target: BenchModel
    draft: BenchModel
    captured: tuple[PartitionedModel, PartitionedModel]

    @classmethod
    def make(
        cls, target: str, draft: str, context: int, batch: int, device: torch.device, candidates: int | None = None
    ) -> BenchPair:
        """Presets or directories, a draft of "self", and what engines of them may have at most."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        module = bench_model(target, context, dtype, device)
        most = Options(
            max_model_len=context, max_num_seqs=batch, num_speculative_tokens=candidates or MOST_AUTO_CANDIDATES
        )
        captured = api.captured_model("target", module.module, module.name, context, most)
        if draft == SELF:
            return cls(module, BenchModel(SELF, module.module), (captured, captured))
        other = bench_model(draft, context, dtype, device, seed=1)
        return cls(module, other, (captured, api.captured_model("draft", other.module, other.name, context, most)))

    def engine(self, *, drafts: bool = True, **options: Any) -> Engine:
        """One of which nothing is resident unless `options` say so, and whose acceptance is made up if they do."""
        return api.build_engine(
            self.options(drafts=drafts, **options), self.captured[0], self.captured[1] if drafts else None
        )

    def options(self, *, drafts: bool = True, **options: Any) -> Options:
        """All options of such an engine."""
        if drafts:
            options = {"draft_window": DRAFT_WINDOW} | options
        draft = self.draft if drafts else None
        return Options(**memory_options(self.target, options, resident=0.0, draft=draft))


def cohort_options(context: int, batch: int, depth: int) -> dict[str, Any]:
    """Options of engines whose requests verify by turns."""
    return {
        "max_model_len": context,
        "max_num_seqs": batch,
        "num_speculative_tokens": depth,
        "drafting": "cohorts",
    }


def place_requests(engine: Engine, context: int, new_tokens: int) -> None:
    """As many requests as the engine takes, as they stand `new_tokens` tokens before the end of their context."""
    start_requests(engine, engine.options.max_num_seqs, context - new_tokens, new_tokens, True, None)


def tokens_of_rounds(rounds: int, candidates: int) -> int:
    """New tokens that each request needs room for in so many rounds with drafting and as many without."""
    return 2 * (candidates + 1) * (rounds + WARMUP) + 2


def measured_rounds(engine: Engine, rounds: int, *, drafts: bool) -> tuple[float, float]:
    """Seconds and streamed bytes of so many rounds, drafted for or not, once they have warmed up."""
    seconds, streamed = seconds_of_rounds(engine, rounds, drafts=drafts)
    return sum(seconds), streamed


def seconds_of_rounds(engine: Engine, rounds: int, *, drafts: bool) -> tuple[list[float], float]:
    """The same, with the seconds of each."""
    for sequence in engine._scheduler.running:
        sequence.drafts = drafts
    for _ in range(WARMUP):
        engine.step()
    seconds, streamed, start = list[float](), engine.metrics().streamed_bytes, time.perf_counter()
    for _ in range(rounds):
        engine.step()
        seconds.append(time.perf_counter() - start)
        start += seconds[-1]
    return seconds, engine.metrics().streamed_bytes - streamed


MADE_UP: dict[str, Any] = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rate": ASSUMED_ACCEPTANCE,
}
"""Options by which as many candidates are right as is assumed of texts that nothing is known of."""
