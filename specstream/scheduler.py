"""Who runs: waiting and running requests, their seats and memory, and the rows each has in the next round."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specstream.cohorts import next_turn
from specstream.errors import OutOfBudget
from specstream.kv import DeviceStore, HostStore, SequenceKV
from specstream.memory import MemoryPlan
from specstream.options import format_size
from specstream.round_spec import SeatSpec
from specstream.sequence import FinishReason, Sequence
from specstream.speculate import Candidates
from specstream.token_scores import TokenScores


@dataclass
class RequestRows:
    """One request's part in a round, and what the round decided about it."""

    sequence: Sequence
    kv: SequenceKV
    tokens: list[int]
    """What its rows hold."""
    prompt: bool
    """Whether they are a part of its prompt: then all are committed whatever comes out."""
    candidates: Candidates
    logits: int
    """How many of its last rows need logits: none while more of the prompt is to come."""
    buffer_start: int | None = None
    """Where its chunks begin in the prompt buffer; None: its rows go to its own blocks."""
    accepted: int = 0
    produced: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    token_scores: TokenScores = field(default_factory=TokenScores)
    next_candidates: Candidates = field(default_factory=Candidates)
    foreseen: bool | None = None
    """Whether its outcome was one that candidates were drafted for ahead; None if none were."""
    draft_failed: bool = False
    """Whether the draft gave something that is no distribution."""
    error: Exception | None = None
    """What went wrong for this request alone: nothing of the round counts for it, and it ends."""

    @classmethod
    def drafted_only(cls, sequence: Sequence, produced: Iterable[int] = ()) -> RequestRows:
        """The part of a request that does not verify in the round: it is drafted for, as if it had produced these."""
        assert sequence.kv is not None
        return cls(sequence, sequence.kv, [], False, Candidates(), 0, produced=list(produced))

    @property
    def verifies(self) -> bool:
        """Whether it has rows in the round; else it is only drafted for."""
        return bool(self.tokens)

    @property
    def known(self) -> list[int]:
        """What is known beforehand of what it produces: of whoever does not verify all, or the last token of its text,
        which it has already."""
        return [] if self.verifies else self.produced or self.sequence.tokens[-1:]

    @property
    def text_length(self) -> int:
        """Tokens before what it produces."""
        return len(self.sequence.tokens) - (not self.verifies and not self.produced)

    @property
    def committed(self) -> int:
        """Rows whose KV stays."""
        return len(self.tokens) - len(self.candidates.tokens) + self.accepted

    def seat_spec(self, most_candidates: int) -> SeatSpec:
        """Its structure; a verification is given the span of a full block, so that rounds look alike."""
        kv, open_chunk = self.kv, self.kv.length // self.kv.layout.chunk_tokens
        certain = kv.length + (len(self.tokens) if self.prompt else 0)
        span = kv.span_of(len(self.tokens) if self.prompt else most_candidates + 1)
        if self.buffer_start is not None:  # exactly
            span = kv.layout.chunks_of(certain) - open_chunk
        return SeatSpec(
            seat=self.sequence.seat,
            resident=kv.resident,
            tail_slots=kv.tail_slots,
            streamed=kv.streamed,
            offload=kv.offload_after(certain),
            open=open_chunk,
            span=span,
            buffer_start=self.buffer_start,
        )


@dataclass
class Scheduler:
    """First come, first served: a request waits until a seat, device blocks and host memory are free for all of it."""

    memory: MemoryPlan
    store: DeviceStore
    host: HostStore
    max_num_seqs: int
    cohorts: bool = False
    """Whether requests verify in two groups, by turns."""
    last_turn: int = 1
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    free_seats: list[int] = field(init=False)
    half_moved: bool = False
    """Whether an error or an interrupt struck while memory changed hands: only `clear` helps then."""

    def __post_init__(self) -> None:
        self.free_seats = list(range(self.max_num_seqs))

    def turn_after(self, running: list[Sequence], turn: int | None = None) -> int | None:
        """Which cohort of the running requests verifies after a round of cohort `turn`, or the latest; None: all do."""
        return next_turn(running, self.last_turn if turn is None else turn) if self.cohorts else None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While it lasts, requests and memory change hands; what stops it in the middle leaves `half_moved`.

        But for OutOfBudget: memory is refused before anything has moved.
        """
        before, self.half_moved = self.half_moved, True
        try:
            yield
        except OutOfBudget:
            self.half_moved = before
            raise
        self.half_moved = before

    def clear(self) -> None:
        """Takes everything out and frees all memory, whatever state it was left in. Copies must have ended."""
        self.half_moved = True
        self.waiting.clear()
        self.running.clear()
        self.store.clear()
        self.host.clear()
        self.free_seats = list(range(self.max_num_seqs))
        self.half_moved = False

    def check_fits(self, sequence: Sequence) -> None:
        """Refuses a request that can never run.

        Raises:
            OutOfBudget: it would not fit even alone.
        """
        layout = self.memory.layout
        total = layout.chunks_of(sequence.limit)
        on_host = total - self.memory.resident_chunks(total, self.memory.num_blocks, self.max_num_seqs)
        if on_host > self.memory.extent_chunks:
            raise OutOfBudget(
                f"a request of {sequence.limit} tokens needs {format_size(on_host * layout.chunk_bytes)} of host "
                f"memory; host_kv_budget is {format_size(self.memory.host_budget)}. Ask for fewer tokens or compile "
                f"with a larger host_kv_budget or gpu_kv_budget"
            )

    def admit(self) -> list[Sequence]:
        """Seats waiting requests, in order, as far as memory goes."""
        admitted = []
        while self.waiting and self.free_seats and self._seat(self.waiting[0]):
            admitted.append(self.running[-1])
        return admitted

    def _seat(self, sequence: Sequence) -> bool:
        memory, layout = self.memory, self.memory.layout
        total, free = layout.chunks_of(sequence.limit), len(self.store.free_blocks)
        resident = memory.resident_chunks(total, free, len(self.free_seats))
        blocks = min(total, resident + memory.tail_slots)
        if blocks > free or total - resident > memory.extent_chunks:
            return False
        with self.moving():
            host = self.host.reserve(total - resident) if resident < total else None
            if host is None and resident < total:
                return False
            sequence.kv = SequenceKV(layout, sequence.limit, resident, memory.tail_slots, self.store.take(blocks), host)
            sequence.seat = self.free_seats.pop(0)
            self.running.append(self.waiting.popleft())
        return True

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out, running or waiting, and frees what it holds.

        Copies of it may still run: whoever gets the memory next uses it after them, on the same lanes.
        """
        if sequence.kv is None:
            self.waiting.remove(sequence)
            return
        with self.moving():
            self.store.give_back(sequence.kv.blocks)
            if sequence.kv.host is not None:
                self.host.release(sequence.kv.host, 0, sequence.kv.host.count)
            self.free_seats = sorted([*self.free_seats, sequence.seat])
            self.running.remove(sequence)

    def choose_rows(self, running: list[Sequence], turn: int | None = None) -> list[RequestRows]:
        """The next round of the running requests, as they are or as they may come to be.

        That is the candidates of every request, or of those of a cohort, and the next part of each prompt while the
        token budget lasts, first come, first served. In the order of their seats: whoever takes the seat of one who has
        left takes his place in rounds as well, which have been planned and captured.
        """
        rows = []
        budget, buffered = self.memory.max_num_batched_tokens, 0
        for sequence in running:
            kv, tokens = sequence.kv, sequence.tokens
            assert kv is not None
            if kv.length < sequence.prompt_length:
                wanted = min(sequence.prompt_length - kv.length, budget)
                stop = kv.length + kv.prompt_rows(wanted, self.memory.prompt_chunks - buffered)
                if stop > kv.length:
                    budget -= stop - kv.length
                    chunks, last = kv.buffered_after(stop), int(stop == sequence.prompt_length)
                    part = RequestRows(sequence, kv, tokens[kv.length : stop], True, Candidates(), last)
                    part.buffer_start = buffered if chunks else None
                    buffered += chunks
                    rows.append(part)
            elif turn is None or sequence.cohort == turn:
                room = min(kv.room, sequence.limit - len(tokens))
                candidates = sequence.candidates.first(room - 1)
                verified = [tokens[-1], *candidates.tokens]
                rows.append(RequestRows(sequence, kv, verified, False, candidates, len(verified)))
        return sorted(rows, key=lambda row: row.sequence.seat)

    def choose_drafted(self, running: list[Sequence], turn: int | None) -> list[RequestRows]:
        """The requests that are drafted for while cohort `turn` verifies: those of the other one."""
        waiting = (s for s in running if s.prompt_is_through and s.drafts and s.cohort != turn)
        return [] if turn is None else [RequestRows.drafted_only(sequence) for sequence in waiting]
