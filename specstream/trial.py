"""How fast an engine is with some settings: a few rounds of requests with a random history."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from specstream.bench_history import place_history
from specstream.depth import expected_tokens
from specstream.engine import Engine
from specstream.graph import PartitionedModel
from specstream.lane_streams import LaneStreams
from specstream.metrics import Metrics
from specstream.options import Options
from specstream.parts import make_parts
from specstream.pinned_pool import PinnedPool
from specstream.policy import foreseen, late_us, usual_round
from specstream.speculate import Candidates
from specstream.trial_rate import TrialRound, rate_of
from specstream.tuned_settings import MORE_DEPTHS, TunedSettings

if TYPE_CHECKING:
    from specstream.workload import Workload

WARMUP = 8
"""Rounds: each kind has occurred often enough to be replayed."""
BLOCKS, ROUNDS = 3, 6
"""The rate of a trial is the middle one of so many blocks of rounds."""
ENOUGH = 1.5
"""Times the tokens that are expected of a trial: so many are seldom decoded; if they are, requests start again."""
HOPELESS = 0.8
"""Part of the best rate: what is slower in its first block is not measured to the end."""


@dataclass(frozen=True)
class Trial:
    """Settings, and what came of them."""

    settings: TunedSettings
    predicted: float | None
    """Tokens a second; None if that could not be told."""
    tokens_per_second: float | None
    """Measured; None if it failed."""
    seconds: float
    """That it took."""
    error: str = ""
    """What went wrong."""
    acceptance: float | None = None
    """The chance that a candidate was right if those before it were, where texts were decoded."""

    @property
    def figures(self) -> dict[str, float | None]:
        """By the names under which TensorBoard shows them."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "predicted_tokens_per_second": self.predicted,
            "trial_seconds": self.seconds,
            **({} if self.acceptance is None else {"acceptance": self.acceptance}),
        }

    def __str__(self) -> str:
        measured = "failed" if self.tokens_per_second is None else f"{self.tokens_per_second:.2f} tokens/s"
        predicted = "" if self.predicted is None else f" ({self.predicted:.2f} predicted)"
        accepted = "" if self.acceptance is None else f", acceptance {self.acceptance:.3f}"
        return f"{measured}{predicted}  {self.settings}{accepted}{f': {self.error}' if self.error else ''}"


Clock = Callable[[], float]


class Stopwatch:
    """Measures engines of two captured models."""

    def __init__(
        self,
        options: Options,
        target: PartitionedModel,
        draft: PartitionedModel | None,
        workload: Workload,
        streams: LaneStreams | None = None,
        clock: Clock = time.perf_counter,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`options` are those that settings are put into. Without `prompts` histories are random and acceptance is made
        up as the workload says; else each request decodes one of them greedily. `streams` are those of an engine that
        was closed; None: new ones."""
        if draft is not None and prompts is None:
            options = replace(
                options,
                rejection_sample_method="synthetic",
                synthetic_acceptance_rate=workload.acceptance,
                synthetic_acceptance_length=None,
            )
        self.options, self.target, self.draft, self.workload, self.clock = options, target, draft, workload, clock
        self.streams = streams or LaneStreams.on(target.spec.device)
        self.pool = PinnedPool()
        self.prompts = prompts
        self.acceptance: float | None = None
        """Of the latest engine, if prompts were given and it drafted."""

    def rate(self, settings: TunedSettings, best: float) -> float:
        """Tokens a second, of all requests together: where acceptance is made up verifications, times what one is
        expected to give.

        Args:
            best: the highest rate so far.

        Raises:
            Whatever making the engine or a round raises; OutOfBudget above all.
        """
        depth = 0 if self.draft is None else settings.num_speculative_tokens
        self.acceptance = None
        options = settings.given_to(self.options)
        parts = make_parts(options, self.target, self.draft, streams=self.streams, pool=self.pool)
        with closing(Engine(parts)) as engine:
            self._start(engine, depth)
            blocks = list[list[TrialRound]]()
            for _ in range(BLOCKS):
                blocks.append([self._round(engine, depth) for _ in range(ROUNDS)])
                if rate_of(blocks[:1]) < HOPELESS * best:
                    break
            if self.prompts is not None and depth:
                self.acceptance = chance_of_acceptance(engine.metrics(), depth)
            if self.prompts is not None or engine.options.drafting != "lookahead":
                return rate_of(blocks)
            return rate_of(blocks, *self._expected_misses(engine))

    def _start(self, engine: Engine, depth: int) -> None:
        """Seats the requests, far enough from their ends, and runs what is not measured."""
        engine.reset()
        room = self._room(depth)
        length = self.workload.context - room
        for seed in range(self.workload.batch):
            if self.prompts is None:
                place_history(engine, length, max_new_tokens=room, seed=seed)
            else:
                engine.submit(self.prompts[seed][-length:], max_new_tokens=room)
        while any(len(sequence.tokens) == sequence.prompt_length for sequence in engine._unfinished()):
            engine.step()
        for index in range(WARMUP):
            if index == 1 and engine.options.drafting == "lookahead":
                _forget_candidates(engine)
            if self._left(engine) > depth + 1:
                engine.step()

    def _room(self, depth: int) -> int:
        """Tokens that a trial may decode: as many with whatever number of candidates is tried, so that all stream
        histories of one length."""
        deepest = max(depth, *MORE_DEPTHS)
        tokens: float = deepest + 1  # of a round
        if self.prompts is None:
            tokens = min(tokens, ENOUGH * expected_tokens(self.workload.acceptance, deepest))
        return min(self.workload.context // 2, ceil((WARMUP + BLOCKS * ROUNDS) * tokens) + deepest + 1)

    def _round(self, engine: Engine, depth: int) -> TrialRound:
        if self._left(engine) <= depth + 1:
            self._start(engine, depth)
        before, start = engine.metrics(), self.clock()
        engine.step()
        seconds, after = self.clock() - start, engine.metrics()
        verified = after.num_verify_rounds - before.num_verify_rounds
        expected = verified * expected_tokens(self.workload.acceptance, depth)
        outcomes = after.num_outcomes - before.num_outcomes
        return TrialRound(
            seconds,
            expected if self.prompts is None else after.generated_tokens - before.generated_tokens,
            after.num_foreseen_outcomes - before.num_foreseen_outcomes < outcomes,
        )

    def _expected_misses(self, engine: Engine) -> tuple[float, Callable[[], float]]:
        """With lookahead: what share of rounds is expected to be missed, and by how many seconds those are predicted to
        take longer."""
        options = replace(engine.options, max_num_seqs=self.workload.batch)
        spec = usual_round(options, replace(engine.memory, max_model_len=self.workload.context))
        missing = 1 - foreseen(engine._planner, spec, self.workload.acceptance)
        return missing, lambda: late_us(engine._planner, spec) / 1e6

    def _left(self, engine: Engine) -> int:
        """Tokens to the end of the request that is nearest to its own; 0 if one has ended."""
        running = engine._scheduler.running
        left = [sequence.limit - len(sequence.tokens) for sequence in running]
        return min(left) if len(left) == self.workload.batch else 0


def _forget_candidates(engine: Engine) -> None:
    """Has drafting follow the next round, as it does where an outcome was not foreseen: that has not occurred often
    enough to be replayed when it begins to be measured, else."""
    for sequence in engine._scheduler.running:
        sequence.candidates = Candidates()


def chance_of_acceptance(metrics: Metrics, depth: int) -> float | None:
    """The chance that a candidate is right if those before it are, of rounds with so many candidates at most; None if
    there were none."""
    whole = metrics.accepted_per_position[depth - 1] if len(metrics.accepted_per_position) >= depth else 0
    judged = metrics.num_accepted_tokens + metrics.num_drafts - whole
    return metrics.num_accepted_tokens / judged if judged else None
