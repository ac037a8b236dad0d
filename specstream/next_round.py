"""The structure of the next round, and of those that can follow it: planned ahead while a device computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.planner import Planner
from specstream.round_plan import Plan
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.scheduler import RequestRows, Scheduler
from specstream.sequence import Sequence


@dataclass(frozen=True)
class LastRound:
    """A round, and which request sat in which seat: what the next one finds in flight."""

    spec: RoundSpec
    turn: int | None
    """Which cohort verified; None: all did."""
    seating: dict[int, int]

    @classmethod
    def of(cls, spec: RoundSpec, turn: int | None, running: list[Sequence]) -> LastRound:
        return cls(spec, turn, _seating(running))

    def is_of(self, seats: tuple[SeatSpec, ...], draft_steps: int, beside: bool) -> bool:
        """Whether all requests verified, in these seats, and so many draft steps were beside the round or after it."""
        spec = self.spec
        drafts = spec.draft_steps, spec.drafts_beside
        return self.turn is None and spec.seats == seats and drafts == (draft_steps, beside)

    def still_wanted(self, spec: RoundSpec, running: list[Sequence]) -> int:
        """How many of the fetches it has issued ahead the next round counts on: those that are its own first ones.

        Whoever joins has nothing to fetch yet; whoever leaves costs what was fetched for him and for seats after his.
        """
        count, seating = 0, _seating(running)
        for issued, wanted in zip(self.spec.exit, spec.first, strict=False):
            seat = wanted[1].seat
            if issued != wanted or self.seating.get(seat) != seating[seat]:
                break
            count += 1
        return count


@dataclass(frozen=True)
class NextRound:
    """Decides structures, and has them planned."""

    options: Options
    memory: MemoryPlan
    scheduler: Scheduler
    planner: Planner

    def structure(
        self,
        running: list[Sequence],
        rows: list[RequestRows],
        turn: int | None,
        last: LastRound | None,
        draft_steps: int,
    ) -> RoundSpec:
        """That of a round of these rows after another one, if that left anything in flight.

        Args:
            running: all requests, of which cohort `turn` verifies; None: all do.
        """
        seats = tuple(row.seat_spec(self.options.most_candidates) for row in rows)
        ahead = turn is None and self.options.drafting == "lookahead"
        if ahead:
            drafts = any(row.candidates.guesses and row.sequence.drafts for row in rows)
        elif turn is None:
            drafts = any(row.logits and row.sequence.drafts for row in rows)
        else:
            drafts = bool(self.scheduler.choose_drafted(running, turn))
        steps = draft_steps if drafts else 0
        if turn is not None:
            next_runs = _next_runs(running, seats)
            spec = replace(self.memory.round_of(seats, steps), drafts_beside=True, next_runs=next_runs)
        elif last is not None and last.is_of(seats, steps, ahead):
            spec = last.spec  # itself, as in most rounds: what follows from it is known
        else:
            spec = replace(self.memory.round_of(seats, steps), drafts_beside=ahead)
        in_flight = 0 if last is None else last.still_wanted(spec, running)
        return spec if spec.in_flight == in_flight else replace(spec, in_flight=in_flight)

    def longest(self, draft_steps: int) -> RoundSpec:
        """The round of one request near `max_model_len`."""
        memory = self.memory
        seat = memory.longest_seat(0, memory.num_blocks, self.options.max_num_seqs)
        return memory.round_of((seat,), draft_steps).warm()

    def work_ahead(self, rows: list[RequestRows], plan: Plan, this: LastRound, draft_steps: int) -> Iterator[bool]:
        """While `this` round is computed: proves its plan, then makes and proves those that the next one may need.

        Yields True after each piece of work: there may be more.
        """
        for _ in self.planner.proof(plan):
            yield True
        for running in possible_requests(self.scheduler.running, rows, this.spec):
            next_turn = self.scheduler.turn_after(running, this.turn)
            next_rows = self.scheduler.choose_rows(running, next_turn)
            structure = self.structure(running, next_rows, next_turn, this, draft_steps).canonical()
            if next_rows and not self.planner.knows(structure):
                for _ in self.planner.pieces(structure):
                    yield True
                self.planner.num_ahead += 1
                for _ in self.planner.proof(self.planner.plan(structure)):
                    yield True
            yield True


def possible_requests(running: list[Sequence], rows: list[RequestRows], spec: RoundSpec) -> Iterator[list[Sequence]]:
    """The running requests as a round can leave them if nobody joins, the likeliest first.

    Of a verification it matters how many chunks it fills. That it fills one is reckoned with wherever in its chunk the
    request stands, so that the plan is there well before it is needed. First all requests fare alike, then one of them
    differs: it fills a chunk, or it leaves.
    """
    most_rows = max((len(row.tokens) for row in rows if not row.prompt), default=1)
    most_filled = max(1, most_rows // rows[0].kv.layout.chunk_tokens)
    unchanged = _after(running, rows, spec, 0)
    yield _going_on(unchanged)
    for filled in range(1, most_filled + 1):
        yield _going_on(_after(running, rows, spec, filled))
    for index, one_filled in enumerate(_after(running, rows, spec, 1)):
        for different in (one_filled, None):
            yield _going_on([*unchanged[:index], different, *unchanged[index + 1 :]])


def _going_on(after: list[Sequence | None]) -> list[Sequence]:
    return [sequence for sequence in after if sequence is not None]


def _after(running: list[Sequence], rows: list[RequestRows], spec: RoundSpec, filled: int) -> list[Sequence | None]:
    """The requests once each verification has filled so many chunks, or has just gone on; None for one that ends."""
    row_of = {row.sequence.request_id: row for row in rows}
    offload_of = {seat.seat: seat.offload for seat in spec.seats}
    after: list[Sequence | None] = []
    for sequence in running:
        row = row_of.get(sequence.request_id)
        after.append(sequence if row is None else _request_after(row, offload_of[sequence.seat], filled))
    return after


def _request_after(row: RequestRows, offloaded: int, filled: int) -> Sequence | None:
    """A copy of a request with its KV moved on; its tokens and candidates do not matter for the structure.

    One that reaches its end before it fills a chunk just goes on: whether it ends is a guess of its own.
    """
    sequence, kv = row.sequence, row.kv
    tokens, left = kv.layout.chunk_tokens, sequence.limit - len(sequence.tokens)
    if row.prompt:
        committed, produced = len(row.tokens), row.logits
    else:
        to_fill = (kv.length // tokens + filled) * tokens - kv.length
        committed = produced = to_fill if filled and to_fill < left else 1
    if produced >= left:
        return None
    return replace(sequence, kv=replace(kv, length=kv.length + committed, streamed=kv.streamed + offloaded))


def _seating(running: list[Sequence]) -> dict[int, int]:
    """Which request sits where."""
    return {sequence.seat: sequence.request_id for sequence in running}


def _next_runs(running: list[Sequence], seats: tuple[SeatSpec, ...]) -> tuple[ChunkRun, ...]:
    """What streams in the round after one of these seats, in their order: the other cohort, and prompts that go on."""
    computed = {seat.seat: seat for seat in seats}
    runs = []
    for sequence in sorted(running, key=lambda each: each.seat):
        kv, seat = sequence.kv, computed.get(sequence.seat)
        assert kv is not None
        if seat is None:
            runs.append(ChunkRun(sequence.seat, kv.resident, kv.resident + kv.streamed))
        elif not sequence.prompt_is_through:
            runs.append(seat.next_on_host)
    return tuple(runs)
