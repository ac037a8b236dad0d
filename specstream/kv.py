"""The KV store: committed target KV in chunks, in two tiers with separately counted memory.

One (layer, chunk) is one contiguous block [K|V][kv_head][token][head_dim] in either tier, so that a copy between
them is one transfer, and consecutive chunks of one layer of one request are neighbours in host memory, so that one
transfer takes several.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specstream.errors import OutOfBudget
from specstream.graph import ModelSpec
from specstream.options import format_size
from specstream.pinned import Pinning
from specstream.pinned_pool import PinnedPool
from specstream.round_spec import PROMPT_SLOTS


@dataclass(frozen=True)
class ChunkLayout:
    """Shape and size of a chunk."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    chunk_tokens: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, chunk_tokens: int) -> ChunkLayout:
        return cls(spec.num_layers, spec.num_kv_heads, spec.head_dim, chunk_tokens, spec.dtype)

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        return (2, self.num_kv_heads, self.chunk_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one chunk in one layer."""
        return 2 * self.num_kv_heads * self.chunk_tokens * self.head_dim * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in all layers."""
        return self.num_layers * self.block_bytes

    def chunks_of(self, tokens: int) -> int:
        return -(-tokens // self.chunk_tokens)


@dataclass
class Extent:
    """A piece of host memory for `len(references)` chunks: blocks [layers, chunks, 2, kv_heads, tokens, head_dim]."""

    blocks: Tensor
    references: list[int]
    """How many hold each chunk; 0 is free."""


@dataclass(frozen=True)
class HostRun:
    """Consecutive chunks of an extent, numbered from 0."""

    extent: Extent
    start: int
    count: int

    def view(self, layer: int, start: int, stop: int) -> Tensor:
        """Blocks of chunks [start, stop) of the run: [stop - start, 2, kv_heads, tokens, head_dim], no copy."""
        return self.extent.blocks[layer, self.start + start : self.start + stop]


@dataclass
class HostStore:
    """The host tier: extents of equal size, allocated as they are needed, up to a budget."""

    layout: ChunkLayout
    budget_bytes: int
    extent_chunks: int
    """Chunks of one extent; the longest run there can be."""
    debug: bool = False
    pinned_for: torch.device | None = None
    """The device that copies from and to it."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where it is: the CPU, or nowhere (meta) for what only plans."""
    extents: list[Extent] = field(default_factory=list)
    pool: PinnedPool | None = None
    """Where pinned memory comes from, as far as it has any, and goes when this is closed."""
    _pinning: Pinning | None = None
    """The next extent, on its way."""

    @property
    def allocated_bytes(self) -> int:
        return len(self.extents) * self._extent_bytes

    @property
    def used_bytes(self) -> int:
        used = sum(1 for extent in self.extents for count in extent.references if count)
        return used * self.layout.chunk_bytes

    def reserve(self, count: int) -> HostRun | None:
        """A run of `count` chunks, each held once; None if it has to wait for others to be released.

        Raises:
            OutOfBudget: longer than any run can be.
        """
        if count > self.extent_chunks:
            raise OutOfBudget(
                f"{count} chunks ({format_size(count * self.layout.chunk_bytes)}) exceed what the host tier holds "
                f"for one request: {self.extent_chunks} chunks of {self.layout.chunk_tokens} tokens"
            )
        for extent in self.extents:
            start = _free_run(extent.references, count)
            if start is not None:
                return self._hold(HostRun(extent, start, count))
        grown = self.allocated_bytes + self._extent_bytes
        if grown > self.budget_bytes:
            return None
        extent = Extent(self._allocate(), [0] * self.extent_chunks)
        self.extents.append(extent)
        return self._hold(HostRun(extent, 0, count))

    def prepare(self) -> None:
        """Begins to pin an extent in the background, for the first that is reserved."""
        if self.pinned_for is None or self._pinning is not None:
            return
        if self.pool is not None:
            if self.pool.holds(self._extent_bytes):
                return
            self.pool.release_one()  # in its place comes one that is large enough
        self._pinning = Pinning(self._shape, self.layout.dtype, self.pinned_for)

    @property
    def _extent_bytes(self) -> int:
        return self.extent_chunks * self.layout.chunk_bytes

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.layout.num_layers, self.extent_chunks, *self.layout.block_shape)

    def _allocate(self) -> Tensor:
        with torch.inference_mode(False):  # other threads write to it, in no such mode
            if self.pinned_for is None:
                return torch.empty(self._shape, dtype=self.layout.dtype, device=self.device)
            kept = None if self.pool is None else self.pool.take(self._extent_bytes)
            if kept is not None:
                return kept.view(self.layout.dtype).view(self._shape)
            self.prepare()
            assert self._pinning is not None
            try:
                blocks = self._pinning.wait()
            except OutOfBudget:
                self._pinning = None  # the next attempt is a new one
                raise
            self._pinning = None
            return blocks

    def retain(self, run: HostRun, start: int, stop: int) -> None:
        """Holds chunks [start, stop) of the run once more."""
        for chunk in range(run.start + start, run.start + stop):
            run.extent.references[chunk] += 1

    def release(self, run: HostRun, start: int, stop: int) -> None:
        """Lets go of chunks [start, stop) of the run; those that nobody holds are free again."""
        for chunk in range(run.start + start, run.start + stop):
            run.extent.references[chunk] -= 1
            if self.debug and run.extent.references[chunk] == 0:
                run.extent.blocks[:, chunk].fill_(float("nan"))

    def clear(self) -> None:
        """Nobody holds anything any more."""
        for extent in self.extents:
            extent.references[:] = [0] * self.extent_chunks
            if self.debug:
                extent.blocks.fill_(float("nan"))

    def close(self) -> None:
        if self.pool is not None and self.pinned_for is not None:
            for extent in self.extents:
                self.pool.keep(extent.blocks)
        self.extents.clear()
        if self._pinning is not None:
            self._pinning.cancel()
            self._pinning = None

    def _hold(self, run: HostRun) -> HostRun:
        self.retain(run, 0, run.count)
        return run


@dataclass
class DeviceStore:
    """The device tier: blocks for resident chunks and tails, the ring the fetches land in, and the prompt buffer."""

    layout: ChunkLayout
    num_blocks: int
    staging_slots: int
    chunks_per_group: int
    device: torch.device
    debug: bool = False
    prompt_chunks: int = 0
    """Chunks in each slot of the prompt buffer."""
    blocks: Tensor = field(init=False)
    """[layers, blocks, 2, kv_heads, tokens, head_dim]"""
    ring: Tensor = field(init=False)
    """[slots, chunks_per_group, 2, kv_heads, tokens, head_dim]"""
    prompt: Tensor = field(init=False)
    """The prompt buffer, [PROMPT_SLOTS, prompt_chunks, 2, kv_heads, tokens, head_dim]: layers use its slots in turn."""
    free_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shape, dtype = self.layout.block_shape, self.layout.dtype
        pool = (self.layout.num_layers, self.num_blocks, *shape)
        ring = (self.staging_slots, self.chunks_per_group, *shape)
        prompt = (PROMPT_SLOTS, self.prompt_chunks, *shape)
        with torch.inference_mode(False):  # other threads write to them, in no such mode
            self.blocks = torch.empty(pool, dtype=dtype, device=self.device)
            self.ring = torch.empty(ring, dtype=dtype, device=self.device)
            self.prompt = torch.empty(prompt, dtype=dtype, device=self.device)
        self.free_blocks = list(range(self.num_blocks))
        if self.debug:
            self.blocks.fill_(float("nan"))
            self.ring.fill_(float("nan"))
            self.prompt.fill_(float("nan"))

    @property
    def total_bytes(self) -> int:
        return self.blocks.nbytes + self.ring.nbytes + self.prompt.nbytes

    def take(self, count: int) -> list[int]:
        """The lowest free blocks, so that neighbours stay neighbours."""
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        return taken

    def clear(self) -> None:
        """All blocks are free again."""
        self.free_blocks = list(range(self.num_blocks))
        if self.debug:
            self.blocks.fill_(float("nan"))

    def give_back(self, blocks: list[int]) -> None:
        if self.debug:
            self.blocks[:, blocks] = float("nan")
        self.free_blocks = sorted(self.free_blocks + blocks)

    def close(self) -> None:
        """Frees the memory, whoever still holds the store."""
        self.blocks, self.ring, self.prompt = (part.new_empty(0) for part in (self.blocks, self.ring, self.prompt))


@dataclass
class SequenceKV:
    """Where the KV of one request is.

    Chunks [0, resident) stay on the device in blocks of their own; later ones take the tail's blocks in turn and
    move to the host when full. `length` counts committed tokens: a commit or a rollback only moves that cursor.
    """

    layout: ChunkLayout
    limit: int
    """Tokens the request may reach."""
    resident: int
    tail_slots: int
    blocks: list[int]
    """Device block of each device slot (see `SeatSpec.device_slot`)."""
    host: HostRun | None
    """Chunks from `resident` on; None if all are resident."""
    length: int = 0
    streamed: int = 0
    """Chunks in host memory: they are fetched in every round."""

    @property
    def room(self) -> int:
        """Rows that the request's own blocks can still take in this round."""
        if self.host is None:
            return self.limit - self.length
        chunks = self.resident + self.streamed + self.tail_slots
        return min(self.limit, chunks * self.layout.chunk_tokens) - self.length

    def prompt_rows(self, wanted: int, free_chunks: int) -> int:
        """Rows of its prompt, at most `wanted`, that a round takes if `free_chunks` of the prompt buffer are free."""
        if self.host is None:
            return wanted
        tokens = self.layout.chunk_tokens
        on_device = self.resident + self.streamed + free_chunks
        end = min(self.length + wanted, on_device * tokens)
        open_chunk, last = self.length // tokens, end // tokens
        begun = self.length % tokens > 0 and open_chunk >= self.resident
        if begun and last > open_chunk and (last - open_chunk) % self.tail_slots == 0:
            end = last * tokens  # the rest would overwrite the open chunk in the tail, which a second try needs
        return max(0, end - self.length)

    def buffered_after(self, length: int) -> int:
        """Chunks of the prompt buffer that a part of its prompt up to `length` tokens needs: none that fills none."""
        if not self.offload_after(length):
            return 0
        return self.layout.chunks_of(length) - self.resident - self.streamed

    def offload_after(self, length: int) -> int:
        """Chunks to write out in a round if `length` tokens are certain to be committed: the full ones."""
        if self.host is None:
            return 0
        return max(0, length // self.layout.chunk_tokens - self.resident - self.streamed)

    def span_of(self, rows: int) -> int:
        """Chunks from the open one on that `rows` more tokens may touch, wherever in the open chunk they start."""
        tokens = self.layout.chunk_tokens
        most = self.layout.chunks_of(self.limit) if self.host is None else self.resident + self.streamed
        most += 0 if self.host is None else self.tail_slots
        open_chunk = self.length // tokens
        return min(1 + -(-(rows - 1) // tokens), most - open_chunk) if rows else 0

    def host_view(self, layer: int, start: int, stop: int) -> Tensor:
        """Host blocks of chunks [start, stop), counted from the first token of the request."""
        assert self.host is not None
        return self.host.view(layer, start - self.resident, stop - self.resident)


def _free_run(references: list[int], count: int) -> int | None:
    """Start of the first `count` consecutive zeros."""
    length = 0
    for index, references_here in enumerate(references):
        length = 0 if references_here else length + 1
        if length == count:
            return index - count + 1
    return None
