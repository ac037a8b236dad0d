"""Verification rounds in steady state: every seat verifies equally many random candidates, and is then rolled back."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from specstream.bench_history import place_history
from specstream.engine import Engine
from specstream.round_spec import RoundSpec
from specstream.sequence import Sequence
from specstream.speculate import Candidates


@dataclass(frozen=True)
class Round:
    """One measured round."""

    ms: float
    """From the end of the round before to its own end."""
    streamed_bytes: int
    changed: bool
    """Whether the round before had other chunks in its places."""
    planned: bool
    """Whether its structure was not foreseen, so that its time includes making the plan."""
    launch_ms: float | None
    """Of the host, until it first waits for the device; None if the executor does not say."""


class SteadyRounds:
    """Runs one round after the other on requests whose histories do not grow of their own accord.

    Up to the end of the context there must be room for a round's tokens and one more: a request that reaches it ends.
    """

    def __init__(self, engine: Engine, batch: int, history: int, queries: int, commit_every: int) -> None:
        self.engine, self.queries, self.commit_every = engine, queries, commit_every
        room = engine.memory.max_model_len - history
        self.sequences = [place_history(engine, history, max_new_tokens=room, seed=seat) for seat in range(batch)]
        self._random = torch.Generator().manual_seed(0)
        self._rounds = 0
        self._last_end = time.perf_counter()

    def run(self) -> Round:
        """One round."""
        engine = self.engine
        planner, streamed_before = engine._planner, engine._executor.streamed_bytes
        planned_before = planner.num_planned - planner.num_ahead
        seats_before = engine._latest_spec.seats if engine._latest_spec else ()
        lengths = [self._propose(sequence) for sequence in self.sequences]
        engine.step()
        end = time.perf_counter()
        seconds, self._last_end = end - self._last_end, end
        self._rounds += 1
        commits = bool(self.commit_every) and self._rounds % self.commit_every == 0
        step = engine.memory.layout.chunk_tokens if commits else 0
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self._move(sequence, length + step)
        launch: float | None = getattr(engine._executor, "launch_seconds", None)
        return Round(
            ms=seconds * 1e3,
            streamed_bytes=engine._executor.streamed_bytes - streamed_before,
            changed=self.latest.seats != seats_before,
            planned=planner.num_planned - planner.num_ahead > planned_before,
            launch_ms=None if launch is None else launch * 1e3,
        )

    @property
    def latest(self) -> RoundSpec:
        """The structure of the latest round."""
        assert self.engine._latest_spec is not None
        return self.engine._latest_spec

    def _propose(self, sequence: Sequence) -> int:
        """Gives the request random candidates; returns its length before they are verified."""
        ids = torch.randint(self.engine.vocab_size, (self.queries - 1,), generator=self._random)
        sequence.candidates = Candidates(ids.tolist())
        sequence.useless_rounds = 0  # nearly all are refused, which is no reason to verify none
        assert sequence.kv is not None
        return sequence.kv.length

    def _move(self, sequence: Sequence, length: int) -> None:
        """Makes `length` tokens committed: a rollback or a commit moves the cursor, and KV is there in either case."""
        assert sequence.kv is not None
        sequence.kv.length = length
        del sequence.tokens[length + 1 :]
        sequence.tokens += [0] * (length + 1 - len(sequence.tokens))
