"""The structure of one round: which chunks stream, which are written out, what the ring holds at its start.

Token values and addresses are data, not structure. How many chunks there are is structure only as far as it decides
how many groups there are: rounds of the same `RoundSpec.canonical()` run the same plan, each on its own chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specstream.round_graph import Task


PROMPT_SLOTS = 2
"""Layers whose prompt rows the prompt buffer holds at a time: one is copied out while the next one computes."""


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive chunks [start, stop) of the request in a seat: what one copy moves."""

    seat: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def full(self, chunks_per_group: int) -> ChunkRun:
        """As many groups, the last one full too."""
        return ChunkRun(self.seat, self.start, self.start + -(-self.count // chunks_per_group) * chunks_per_group)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __str__(self) -> str:
        return f"seat {self.seat} chunks {self.start}:{self.stop}"


@dataclass(frozen=True)
class SeatSpec:
    """One request's part in a round.

    Its chunks, from the first token on: [0, resident) never leave the device; the next `streamed` are in host
    memory and are fetched; the next `offload` are full, or will be once this round's prompt rows are appended,
    and are written to the host in this round; the rows of the round land in chunks [open, open + span).

    A part of a prompt that fills chunks which do not stay on the device is computed in the *prompt buffer*: from the
    first of those chunks on, its chunks lie there one after the other, the last one in the tail as well if it is not
    full yet.
    """

    seat: int
    resident: int
    tail_slots: int
    """Device slots that the chunks after the resident ones share in turn."""
    streamed: int
    offload: int
    open: int
    span: int
    buffer_start: int | None = None
    """Where its chunks begin in each slot of the prompt buffer; None: its rows land in its own blocks."""

    @cached_property
    def on_host(self) -> ChunkRun:
        return ChunkRun(self.seat, self.resident, self.resident + self.streamed)

    @cached_property
    def offloaded(self) -> ChunkRun:
        return ChunkRun(self.seat, self.on_host.stop, self.on_host.stop + self.offload)

    @cached_property
    def buffered(self) -> ChunkRun:
        """Chunks that are in the prompt buffer: those that are written out, and the one that is not full yet."""
        end = self.open + self.span
        return ChunkRun(self.seat, end if self.buffer_start is None else self.on_host.stop, end)

    @cached_property
    def kept(self) -> ChunkRun:
        """Of the buffered chunks what is not written out: the tail has it too, for later rounds."""
        return ChunkRun(self.seat, max(self.offloaded.stop, self.buffered.start), self.buffered.stop)

    @cached_property
    def next_on_host(self) -> ChunkRun:
        return ChunkRun(self.seat, self.resident, self.offloaded.stop)

    def canonical(self, chunks_per_group: int) -> SeatSpec:
        """The representative of all seats whose rounds one plan serves: with as many groups, now and in the next round.

        Groups are as full as they can be. A round of a request that streams always has room to write out one chunk,
        in the middle of a group; if it has none to write, nothing is copied. A chunk that begins a group of the next
        round is another form: the fetch of that group waits for it.
        """
        if not self.streamed and not self.offload:  # everything it has is on the device
            return replace(self, open=0) if self.open + self.span <= self.resident else self
        behind = self.open - self.streamed  # the open chunk, counted from the first one that is not on the host
        groups, then = (-(-chunks // chunks_per_group) for chunks in (self.streamed, self.streamed + self.offload))
        offload = self.offload
        roomy = chunks_per_group > 1 and 1 + self.span <= self.tail_slots
        if not offload and roomy and behind == self.resident:
            offload, behind = 1, behind + 1
        apart = self.offload > 0 and self.streamed % chunks_per_group == 0
        fullest = groups * chunks_per_group - (0 if apart or not offload else 1)
        streamed = next(s for s in range(fullest, -1, -1) if -(-(s + offload) // chunks_per_group) == then)
        return replace(self, streamed=streamed, offload=offload, open=streamed + behind)

    def with_offload(self, chunks_per_group: int) -> SeatSpec:
        """The same with the chunk to write out for which a round of its canonical form has room, if it has none."""
        form = self.canonical(chunks_per_group)
        if form.offload == self.offload:
            return self
        streamed = min(self.streamed, form.streamed)
        return replace(self, streamed=streamed, offload=form.offload, open=streamed + form.open - form.streamed)

    def device_slot(self, chunk: int) -> int:
        """The device slot of a chunk: its own while resident, one of the tail's in turn after that."""
        return chunk if chunk < self.resident else self.resident + (chunk - self.resident) % self.tail_slots


def group_chunks(runs: tuple[ChunkRun, ...], chunks_per_group: int) -> tuple[ChunkRun, ...]:
    """The groups of one layer: each run cut into pieces of `chunks_per_group`, the last one shorter."""
    return tuple(
        ChunkRun(run.seat, start, min(start + chunks_per_group, run.stop))
        for run in runs
        for start in range(run.start, run.stop, chunks_per_group)
    )


Fetch = tuple[int, ChunkRun]
"""A fetch by its layer and chunks."""


def _first_fetches(num_layers: int, groups: tuple[ChunkRun, ...], count: int) -> tuple[Fetch, ...]:
    return tuple(islice(product(range(num_layers), groups), count))


@dataclass(frozen=True)
class RoundSpec:
    """The structure of one round.

    Ring slots are numbered from the round's own first fetch: fetch i lands in slot i mod staging_slots, and the
    executor adds the rotation left by earlier rounds, so that counts that do not divide still close the cycle.
    """

    num_layers: int
    staging_slots: int
    chunks_per_group: int
    bytes_per_chunk: int
    """Bytes of K and V of one chunk in one layer."""
    seats: tuple[SeatSpec, ...]
    in_flight: int
    """How many of this round's first fetches the round before has issued: at most as many as there are slots."""
    draft_steps: int
    """0 when nothing drafts."""
    drafts_beside: bool = False
    """Whether the draft steps are for requests that do not verify in this round, and run beside it; else they are for
    its own requests, and come after acceptance."""
    next_runs: tuple[ChunkRun, ...] | None = None
    """What the next round streams, a run a request, if it is not a round of the same requests."""

    @cached_property
    def groups(self) -> tuple[ChunkRun, ...]:
        """What every layer of this round fetches, in order."""
        return group_chunks(tuple(s.on_host for s in self.seats), self.chunks_per_group)

    @cached_property
    def next_groups(self) -> tuple[ChunkRun, ...]:
        """What every layer of the next round fetches if nobody joins or leaves."""
        runs = tuple(s.next_on_host for s in self.seats) if self.next_runs is None else self.next_runs
        return group_chunks(runs, self.chunks_per_group)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Reckoned once: plans and graphs are looked up by it in every round."""
        return self._hash

    @cached_property
    def seating(self) -> tuple[int, ...]:
        """The seats in order, those that the next round streams for last: what the canonical form leaves out."""
        return (*(seat.seat for seat in self.seats), *(run.seat for run in self.next_runs or ()))

    def canonical(self) -> RoundSpec:
        """The representative of all rounds that run the same plan: whoever sits where, seats are numbered in order."""
        return self._canonical

    @cached_property
    def _canonical(self) -> RoundSpec:
        forms = [seat.canonical(self.chunks_per_group) for seat in self.seats]
        seats = tuple(replace(form, seat=place) for place, form in enumerate(forms))
        if self.next_runs is None:
            return replace(self, seats=seats)
        number = {form.seat: place for place, form in enumerate(forms)}
        own, next_runs = {form.seat: form.next_on_host for form in forms}, []
        for run in self.next_runs:
            shared = own.get(run.seat) or run.full(self.chunks_per_group)
            next_runs.append(replace(shared, seat=number.setdefault(run.seat, len(number))))
        return replace(self, seats=seats, next_runs=tuple(next_runs))

    def with_offloads(self) -> RoundSpec:
        """The same round if whoever may write out a chunk has one: with all tasks of the plan that it runs."""
        seats = tuple(seat.with_offload(self.chunks_per_group) for seat in self.seats)
        own = {seat.seat: seat.next_on_host for seat in seats}
        runs = None if self.next_runs is None else tuple(own.get(run.seat, run) for run in self.next_runs)
        return replace(self, seats=seats, next_runs=runs)

    def run_of(self, task: Task) -> ChunkRun:
        """The chunks that a fetch, attend or offload of the canonical plan is about in this round; none is possible."""
        assert task.run is not None
        if task.place >= 0:
            return self.seats[task.place].offloaded
        return (self.next_groups if task.phase == "ahead" else self.groups)[task.group]

    @property
    def num_fetches(self) -> int:
        return self.num_layers * len(self.groups)

    @cached_property
    def first(self) -> tuple[Fetch, ...]:
        """Its first fetches in ring order, as many as can be in flight when it starts."""
        return _first_fetches(self.num_layers, self.groups, self.staging_slots)

    @property
    def entry(self) -> tuple[Fetch, ...]:
        """The fetches in flight when the round starts that it counts on."""
        return self.first[: self.in_flight]

    def warm(self) -> RoundSpec:
        """The same round if as many of its fetches are in flight as can be."""
        return replace(self, in_flight=len(self.first))

    @cached_property
    def exit(self) -> tuple[Fetch, ...]:
        """Fetches in flight when the round ends: the first ones of the next round."""
        return _first_fetches(self.num_layers, self.next_groups, self.staging_slots)

    @cached_property
    def fetched_bytes(self) -> int:
        """Bytes this round puts on the link: those it streams, without what was fetched ahead, and what it does."""
        ahead = sum(run.count for _, run in self.exit) - sum(run.count for _, run in self.entry)
        return self.streamed_bytes + self.bytes_per_chunk * ahead

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes this round attends to from the host: layers x streamed chunks x bytes per chunk."""
        return self.num_layers * self.bytes_per_chunk * sum(s.streamed for s in self.seats)
