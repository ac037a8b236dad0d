"""Counters of an engine, named and defined as vLLM does where it has them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specstream.memory import MemoryPlan
from specstream.scheduler import RequestRows


@dataclass(frozen=True)
class Metrics:
    """What an engine did since it was made or reset."""

    num_rounds: int
    """All rounds, prefill included."""
    num_verify_rounds: int
    """Verification rounds, counted once for each request in them."""
    num_drafts: int
    """Of these, verifications of candidates."""
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    """How often the candidate at each position was accepted."""
    num_outcomes: int
    """With lookahead: verifications of candidates after which the request went on."""
    num_foreseen_outcomes: int
    """Those whose outcome was one that candidates were drafted for meanwhile."""
    generated_tokens: int
    decode_seconds: float
    """Wall time of rounds in which no prompt was computed."""
    decode_tokens: int
    """Tokens produced in those rounds."""
    prefill_seconds: float
    streamed_bytes: int
    """History attended to from the host, in all rounds."""
    streamed_bytes_per_round: float
    """The same, of decode rounds, on average."""
    link_bytes: int
    """Bytes fetched, those fetched ahead and dropped included."""
    device_kv_bytes: int
    """All target KV memory on the device."""
    full_kv_bytes: int
    """KV of the longest request so far, if it were all on the device."""

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / verification rounds: the bonus token is included."""
        return 1 + self.num_accepted_tokens / self.num_verify_rounds if self.num_verify_rounds else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """For each candidate position, the share of verification rounds that accepted it."""
        return tuple(n / max(1, self.num_verify_rounds) for n in self.accepted_per_position)

    @property
    def lookahead_hit_rate(self) -> float:
        """The share of outcomes that were foreseen."""
        return self.num_foreseen_outcomes / self.num_outcomes if self.num_outcomes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of decoding."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class Counters:
    """The running sums behind `Metrics`."""

    num_rounds: int = 0
    num_verify_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_outcomes: int = 0
    num_foreseen_outcomes: int = 0
    generated_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_rounds: int = 0
    decode_streamed_bytes: int = 0
    prefill_seconds: float = 0.0
    longest_request: int = 0
    """Tokens."""

    def count_round(self, rows: Seq[RequestRows], streamed_bytes: int, seconds: float) -> None:
        """Adds a finished round: its rows, the bytes it streamed, its wall time."""
        produced = sum(len(row.produced) for row in rows)
        self.num_rounds += 1
        self.generated_tokens += produced
        if any(row.prompt for row in rows):
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_tokens += produced
            self.decode_rounds += 1
            self.decode_streamed_bytes += streamed_bytes
        for row in rows:
            if not row.prompt and row.error is None:
                self._count_verification(len(row.candidates.tokens), row.accepted)
                self.num_outcomes += row.foreseen is not None
                self.num_foreseen_outcomes += row.foreseen is True

    def _count_verification(self, proposed: int, accepted: int) -> None:
        self.num_verify_rounds += 1
        self.num_drafts += proposed > 0
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        self.accepted_per_position += [0] * (proposed - len(self.accepted_per_position))
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def metrics(self, memory: MemoryPlan, streamed_bytes: int, link_bytes: int) -> Metrics:
        """The sums as they are now, with the executor's bytes."""
        layout = memory.layout
        return Metrics(
            num_rounds=self.num_rounds,
            num_verify_rounds=self.num_verify_rounds,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_per_position=tuple(self.accepted_per_position),
            num_outcomes=self.num_outcomes,
            num_foreseen_outcomes=self.num_foreseen_outcomes,
            generated_tokens=self.generated_tokens,
            decode_seconds=self.decode_seconds,
            decode_tokens=self.decode_tokens,
            prefill_seconds=self.prefill_seconds,
            streamed_bytes=streamed_bytes,
            streamed_bytes_per_round=self.decode_streamed_bytes / max(1, self.decode_rounds),
            link_bytes=link_bytes,
            device_kv_bytes=memory.device_kv,
            full_kv_bytes=layout.chunks_of(self.longest_request) * layout.chunk_bytes,
        )
