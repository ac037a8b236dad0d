"""The memory plan: every size resolved before anything is allocated, or refused with the figures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from specstream.errors import InvalidOption, OutOfBudget
from specstream.graph import ModelSpec
from specstream.kv import ChunkLayout
from specstream.options import Options, format_size, parse_size
from specstream.ring import Fill, longer_ring, own_device_slots
from specstream.round_spec import PROMPT_SLOTS, RoundSpec, SeatSpec

MAX_GROUPS = 16
"""Groups a layer and request that an automatic group size aims at: fewer and larger copies use the link better."""
AUTO_SLOTS = 4
OWN_DEVICE_CHUNK = 64
"""Tokens: as many as the kernels attend to at a time, so that they look a chunk up once."""
LEAST_GROUP_BYTES, MOST_GROUP_BYTES = 64 << 20, 256 << 20
"""Of copies to a device of its own: half of a long request's layer within these, so that a round is quick to launch."""
MIN_AUTO_CHUNK, MAX_AUTO_CHUNK = 16, 512
"""Tokens."""
HOST_SHARE = 0.8
"""Part of the free host memory that an automatic host budget takes."""
DEVICE_SHARE = 0.25
"""Part of the free memory that an automatic device budget takes where the device is the host."""

BATCHED_TOKENS, OWN_DEVICE_BATCHED_TOKENS = 2048, 8192
"""Prompt tokens of a round: on a device of its own so many that computing them takes longer than streaming a long
history past them."""
OWN_DEVICE_SHARE = 0.8
"""Part of the free memory of a device of its own that its KV, the draft's included, may take; the rest is for work."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of everything, in bytes unless the name says otherwise."""

    layout: ChunkLayout
    max_model_len: int
    """Tokens."""
    chunks_per_group: int
    staging_slots: int
    tail_slots: int
    """Device blocks of a request's tail."""
    num_blocks: int
    """Device blocks: tails and resident chunks of all requests."""
    max_num_batched_tokens: int
    """Prompt tokens of a round, at most."""
    prompt_chunks: int
    """Chunks in each slot of the prompt buffer: none if every request is resident whole, fewer on a full device."""
    host_budget: int
    extent_chunks: int
    draft_kv: int
    weights: int
    draft_weights: int
    drawn_from: int = 0
    """Distributions that candidates were drawn from, until they are accepted or not."""
    workspace: int = 0
    """Work memory of rounds and prompts on a device of its own, at most."""

    def resident_chunks(self, total: int, free_blocks: int, empty_seats: int) -> int:
        """Of a request's `total` chunks, how many stay on the device, so that every other empty seat keeps a tail."""
        return _resident(total, free_blocks, empty_seats, self.tail_slots)

    @property
    def streams(self) -> bool:
        """Whether the longest request does not fit on the device."""
        return self.device_kv - self.ring < self.full_kv

    @property
    def all_resident(self) -> bool:
        """Whether every request stays on the device whole."""
        return not self.prompt_chunks

    @property
    def ring(self) -> int:
        return self.staging_slots * self.chunks_per_group * self.layout.block_bytes

    @property
    def device_kv(self) -> int:
        """All target KV on the device."""
        return self.ring + self.num_blocks * self.layout.chunk_bytes

    @property
    def prompt_buffer(self) -> int:
        """Work memory of prompt rounds, beside the KV."""
        return PROMPT_SLOTS * self.prompt_chunks * self.layout.block_bytes

    @property
    def device_bytes(self) -> int:
        """All that is planned on the device."""
        of_draft = self.draft_weights + self.draft_kv + self.drawn_from
        return self.weights + of_draft + self.device_kv + self.prompt_buffer + self.workspace

    @property
    def full_kv(self) -> int:
        """KV of one request of `max_model_len` tokens."""
        return self.layout.chunks_of(self.max_model_len) * self.layout.chunk_bytes

    def round_of(self, seats: tuple[SeatSpec, ...], draft_steps: int) -> RoundSpec:
        """A round of these seats, before which nothing was fetched."""
        return RoundSpec(
            num_layers=self.layout.num_layers,
            staging_slots=self.staging_slots,
            chunks_per_group=self.chunks_per_group,
            bytes_per_chunk=self.layout.block_bytes,
            seats=seats,
            in_flight=0,
            draft_steps=draft_steps,
        )

    def longest_seat(self, seat: int, free_blocks: int, empty_seats: int) -> SeatSpec:
        """A request near `max_model_len`, of which as much is resident as `resident_chunks` says."""
        total = self.layout.chunks_of(self.max_model_len)
        resident = self.resident_chunks(total, free_blocks, empty_seats)
        streamed = max(0, total - resident - 1)
        return SeatSpec(seat, resident, self.tail_slots, streamed, 0, min(resident + streamed, total - 1), 1)

    def __str__(self) -> str:
        rows = {
            "target weights": self.weights,
            "draft weights": self.draft_weights,
            "draft KV": self.draft_kv,
            **({"draft distributions": self.drawn_from} if self.drawn_from else {}),
            f"ring of {self.staging_slots} x {self.chunks_per_group} chunks": self.ring,
            f"{self.num_blocks} blocks of {self.layout.chunk_tokens} tokens": self.device_kv - self.ring,
            f"prompt buffer of {PROMPT_SLOTS} x {self.prompt_chunks} chunks": self.prompt_buffer,
            **({"workspace": self.workspace} if self.workspace else {}),
            "host KV, at most": self.host_budget,
            f"one request of {self.max_model_len} tokens": self.full_kv,
        }
        return "\n".join(f"{name:<36} {format_size(size):>12}" for name, size in rows.items())


def tail_slots_for(num_speculative_tokens: int, chunk_tokens: int) -> int:
    """Blocks a tail needs: what is being written out, the open chunk, and room for a round's rows, block-aligned."""
    rows = num_speculative_tokens + 1
    return 1 + 2 * -(-rows // chunk_tokens)


def resolve_max_model_len(options: Options, target: ModelSpec) -> int:
    """The longest request in tokens.

    Raises:
        InvalidOption: beyond the target's positions, or "auto" where the model states none.
    """
    if options.max_model_len == "auto":
        if target.max_positions is None:
            raise InvalidOption("max_model_len", "auto", "a number of tokens, since the model states no limit")
        return target.max_positions
    if target.max_positions is not None and options.max_model_len > target.max_positions:
        factor = options.max_model_len / target.max_positions
        raise InvalidOption(
            "max_model_len",
            options.max_model_len,
            f"at most {target.max_positions}, the positions {target.name} covers",
            f'Beyond that, load it with rope_parameters of rope_type "yarn" and factor {factor:.2g} or more.',
        )
    return options.max_model_len


def resolve_batched_tokens(options: Options, *, own_device: bool) -> int:
    """Prompt tokens of a round, at most."""
    return _given(options.max_num_batched_tokens, OWN_DEVICE_BATCHED_TOKENS if own_device else BATCHED_TOKENS)


def resolve_layout(options: Options, target: ModelSpec, *, own_device: bool) -> ChunkLayout:
    """Of the target's chunks."""
    max_len = resolve_max_model_len(options, target)
    least_chunk = OWN_DEVICE_CHUNK if own_device else MIN_AUTO_CHUNK
    chunk_tokens = _given(
        options.chunk_tokens, min(MAX_AUTO_CHUNK, max(least_chunk, 1 << max(0, (max_len // 64).bit_length() - 1)))
    )
    # A larger one would only waste memory.
    return ChunkLayout.of(target, min(chunk_tokens, max(MIN_AUTO_CHUNK, max_len)))


def resolve_group(options: Options, layout: ChunkLayout, request_chunks: int, *, own_device: bool) -> int:
    """Chunks of a group, if there is room for a ring of such."""
    return _given(options.group_chunks, _auto_group(layout, request_chunks, options.max_num_seqs, own_device))


def no_work(prompt_rows: int) -> int:
    """Where the device is the host, its work memory is not planned."""
    return 0


def host_budget(options: Options, free_host: int | None = None) -> int:
    """Bytes of host memory that KV may take, if so many are free; None asks the system."""
    if options.host_kv_budget != "auto":
        return parse_size("host_kv_budget", options.host_kv_budget)
    return int((psutil.virtual_memory().available if free_host is None else free_host) * HOST_SHARE)


def plan_memory(
    options: Options,
    target: ModelSpec,
    *,
    weights: int,
    draft_weights: int = 0,
    draft_kv: int = 0,
    drawn_from: int = 0,
    free_host: int | None = None,
    free_device: int | None = None,
    idle_bytes: int = 0,
    work: Callable[[int], int] = no_work,
) -> MemoryPlan:
    """Resolves every "auto" and checks the budgets.

    Args:
        weights, draft_weights, draft_kv, drawn_from: bytes, for the account.
        free_host: free host memory in bytes; None asks the system.
        free_device: free memory of a device with memory of its own, weights loaded; None where the device is the host.
        idle_bytes: what the link can bring while no round is computed: an automatic ring on such a device has room for
            it, so that the link goes on meanwhile.
        work: bytes of work memory on such a device, by how many rows of prompts a round computes at most.

    Raises:
        OutOfBudget: a budget is less than what works, or more than there is; the text has the least that does.
    """
    max_len = resolve_max_model_len(options, target)
    free = psutil.virtual_memory().available if free_host is None else free_host
    own_device = free_device is not None
    layout = resolve_layout(options, target, own_device=own_device)
    chunk_tokens, request_chunks = layout.chunk_tokens, layout.chunks_of(max_len)
    tail = tail_slots_for(options.most_candidates, chunk_tokens)
    least = _device_bytes(layout, _given(options.staging_slots, 1), _given(options.group_chunks, 1), tail)
    most = layout.chunk_bytes * max(tail, request_chunks) * options.max_num_seqs
    wanted_group = resolve_group(options, layout, request_chunks, own_device=own_device)
    wanted_slots = _given(options.staging_slots, own_device_slots(target.num_layers) if own_device else AUTO_SLOTS)
    batched_tokens = resolve_batched_tokens(options, own_device=own_device)
    prompt_chunks = layout.chunks_of(batched_tokens) + options.max_num_seqs  # each may begin within a chunk
    prompt_chunks = min(prompt_chunks, request_chunks * options.max_num_seqs)
    if options.gpu_kv_budget == "auto":
        ring = _device_bytes(layout, wanted_slots, wanted_group, 0)
        room = int(free * DEVICE_SHARE)
        if free_device is not None:
            drafts = draft_kv + drawn_from
            room = min(int(free_device * OWN_DEVICE_SHARE), free_device - work(batched_tokens))
            room -= drafts + PROMPT_SLOTS * prompt_chunks * layout.block_bytes
        budget = max(least, min(ring + most, room))
    elif options.gpu_kv_budget == "min":
        budget = least
    else:
        budget = parse_size("gpu_kv_budget", options.gpu_kv_budget)
    if budget < least:
        raise _too_small(options, target, layout, tail, budget, least)
    if own_device and options.staging_slots == "auto":
        left = (budget - _device_bytes(layout, wanted_slots, wanted_group, 0)) // layout.chunk_bytes
        streamed = request_chunks - _resident(request_chunks, max(0, left) // options.max_num_seqs, 1, tail)
        fill = Fill(layout.block_bytes, wanted_group, streamed)
        wanted_slots = longer_ring(target.num_layers, wanted_slots, fill, idle_bytes, budget // 2)
    slots, group = _shrink_ring(options, layout, tail, budget, wanted_slots, wanted_group)
    num_blocks = min(
        (budget - _device_bytes(layout, slots, group, 0)) // layout.chunk_bytes, most // layout.chunk_bytes
    )
    taken = _device_bytes(layout, slots, group, num_blocks)
    least_work = work(chunk_tokens)
    if free_device is not None and taken + draft_kv + drawn_from + least_work > free_device:
        raise _device_too_full(options, taken, least, (draft_kv, drawn_from, least_work), free_device)
    whole = num_blocks == most // layout.chunk_bytes
    if free_device is not None:  # with less room, parts of prompts are smaller

        def taken_by(chunks: int) -> int:
            buffer = 0 if whole else PROMPT_SLOTS * chunks * layout.block_bytes
            return buffer + work(min(batched_tokens, chunks * chunk_tokens))

        most_chunks = layout.chunks_of(batched_tokens) if whole else prompt_chunks
        left = free_device - taken - draft_kv - drawn_from
        prompt_chunks = 1 + bisect_right(range(2, most_chunks + 1), left, key=taken_by)
        batched_tokens = min(batched_tokens, prompt_chunks * chunk_tokens)
    resident = _resident(request_chunks, num_blocks, options.max_num_seqs, tail)
    host_chunks = request_chunks - resident
    on_host = host_budget(options, free)
    if host_chunks * layout.chunk_bytes > on_host:
        fits = (on_host // layout.chunk_bytes + resident) * chunk_tokens
        raise OutOfBudget(
            f"a request of max_model_len={max_len} tokens needs {format_size(host_chunks * layout.chunk_bytes)} of "
            f"host memory; host_kv_budget is {format_size(on_host)}",
            f"{f'max_model_len={fits} would fit, or' if fits else 'Way out:'} a larger host_kv_budget or gpu_kv_budget",
        )
    return MemoryPlan(
        layout=layout,
        max_model_len=max_len,
        chunks_per_group=group,
        staging_slots=slots,
        tail_slots=tail,
        num_blocks=num_blocks,
        max_num_batched_tokens=batched_tokens,
        prompt_chunks=0 if whole else prompt_chunks,
        host_budget=on_host,
        extent_chunks=min(request_chunks, on_host // layout.chunk_bytes),
        draft_kv=draft_kv,
        drawn_from=drawn_from,
        workspace=work(batched_tokens),
        weights=weights,
        draft_weights=draft_weights,
    )


def _resident(total: int, free_blocks: int, empty_seats: int, tail: int) -> int:
    blocks = max(min(total, tail), free_blocks - tail * (empty_seats - 1))
    return total if blocks >= total else max(0, blocks - tail)


def _auto_group(layout: ChunkLayout, request_chunks: int, requests: int, own_device: bool) -> int:
    """Chunks of a group: on a device of its own so many that a layer of all requests has few groups, none too small."""
    if not own_device:
        return -(-request_chunks // MAX_GROUPS)
    together = -(-request_chunks * requests // max(MAX_GROUPS, requests))
    half = request_chunks * layout.block_bytes // 2
    return min(request_chunks, max(together, min(max(LEAST_GROUP_BYTES, half), MOST_GROUP_BYTES) // layout.block_bytes))


def _given(option: int | str, automatic: int) -> int:
    return option if isinstance(option, int) else automatic


def _device_bytes(layout: ChunkLayout, slots: int, group: int, blocks: int) -> int:
    return slots * group * layout.block_bytes + blocks * layout.chunk_bytes


def _shrink_ring(
    options: Options, layout: ChunkLayout, tail: int, budget: int, slots: int, group: int
) -> tuple[int, int]:
    """The largest automatic ring that leaves a tail: fewer slots first, then smaller groups."""
    while _device_bytes(layout, slots, group, tail) > budget:
        if options.staging_slots == "auto" and slots > 2:
            slots -= 1
        elif options.group_chunks == "auto" and group > 1:
            group = -(-group // 2)
        else:
            slots -= 1
    return slots, group


def _device_too_full(options: Options, taken: int, least: int, beside: tuple[int, int, int], free: int) -> OutOfBudget:
    """`beside` are bytes of the draft's KV, of its distributions and of work memory, at least."""
    draft_kv, drawn_from, work = beside
    takes = f" and the draft's KV {format_size(draft_kv)}" if draft_kv else ""
    takes += f", its distributions {format_size(drawn_from)}" if drawn_from else ""
    takes += f", workspace {format_size(work)}" if work else ""
    text = f"the target's KV on the device takes {format_size(taken)}{takes}; {format_size(free)} are free there"
    if least + sum(beside) <= free:
        most = format_size(free - sum(beside))
        return OutOfBudget(text, f"Way out: a gpu_kv_budget of at most {most}; {format_size(least)} works")
    smaller = "a smaller draft_window, " if draft_kv and options.draft_window in (None, "auto") else ""
    fewer = "fewer max_num_seqs, " if options.max_num_seqs > 1 else ""
    return OutOfBudget(
        text,
        f"The least that works is {format_size(least + sum(beside))}. Ways out: {smaller}{fewer}smaller "
        f"chunk_tokens, or a device with more memory",
    )


def _too_small(
    options: Options, target: ModelSpec, layout: ChunkLayout, tail: int, budget: int, least: int
) -> OutOfBudget:
    text = (
        f"gpu_kv_budget is {format_size(budget)}; the least that works is {format_size(least)} ({least} bytes): "
        f"{tail} chunks of {layout.chunk_tokens} tokens for a tail and a ring"
    )
    smaller = layout.chunk_tokens
    while smaller > 1:
        smaller //= 2
        fitting = ChunkLayout.of(target, smaller)
        blocks = tail_slots_for(options.most_candidates, smaller)
        if _device_bytes(fitting, _given(options.staging_slots, 1), _given(options.group_chunks, 1), blocks) <= budget:
            return OutOfBudget(text, f'Ways out: gpu_kv_budget="min", or chunk_tokens={smaller}, which fits')
    return OutOfBudget(text, 'Way out: gpu_kv_budget="min"')
