"""Attention of a verification round by the Triton kernels, over buffers that stay where they are.

A layer with everything on the device is two launches, attend and merge; each streamed group is two more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specstream.attention import Rows
from specstream.batch import RoundBatch, SeatRows
from specstream.graph import AttentionSpec
from specstream.kernels.attention import AttentionState
from specstream.kernels.tiling import Tiling, choose_tiling
from specstream.kernels.triton_attend import MAX_OWN_ROWS, OwnRows, Seats, attend
from specstream.kernels.triton_merge import merge
from specstream.kv import DeviceStore
from specstream.round_spec import ChunkRun
from specstream.round_tables import RoundTables


class KernelAttention:
    """Does what `LayerAttention` does, with what a round's rows are read from `tables` on the device."""

    def __init__(self, store: DeviceStore, tables: RoundTables, attention: AttentionSpec, most_rows: int) -> None:
        """`attention` is any of the model's; `most_rows` is what one seat may have in a round."""
        self.store, self.tables = store, tables
        sizes, layout = tables.sizes, store.layout
        group = attention.num_heads // attention.num_kv_heads
        shape = (attention.num_kv_heads, group, min(most_rows, MAX_OWN_ROWS))

        def tiling(seats: int, chunks: int) -> Tiling:
            keys = chunks * layout.chunk_tokens
            return choose_tiling(seats, *shape, keys, layout.head_dim, layout.dtype)

        self._local, self._staged = tiling(sizes.seats, sizes.blocks), tiling(1, sizes.chunks_per_group)
        heads, rows, device = attention.num_heads, sizes.rows, store.device
        most = 1 + max(self._local.splits, self._staged.splits)

        def state(*leading: int) -> AttentionState:
            lse = torch.zeros(*leading, heads, rows, device=device)
            return AttentionState(lse.new_zeros(*lse.shape, layout.head_dim), lse)

        self._parts, self._state = state(most), state()
        self._own: tuple[Tensor, Tensor] | None = None
        self._out: Tensor | None = None

    def inputs(self, batch: RoundBatch) -> dict[str, Tensor]:
        """Those of the tables, with logits for every row."""
        tables = self.tables
        return {
            "input_ids": tables.input_ids,
            "position_ids": tables.position_ids,
            "logit_rows": tables.logit_rows,
        }

    def append(self, layer: int, key: Tensor, value: Tensor, seats: Rows) -> None:
        """Keeps K and V, [1, kv_heads, N, head_dim], for `local`, which writes them in the same launch."""
        self._own = key[0], value[0]

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None:
        """Starts the state with what is on the device, and writes the rows' own K and V there."""
        assert self._own is not None
        tables = self.tables
        own = OwnRows(*self._own, tables.ancestors, tables.position, tables.append_table)
        parts = self._parts_of(self._local.splits + 1)
        attend(query[0], self.store.blocks[layer], tables.local, attention.scale, self._local, parts, own)
        self._own, self._out = None, torch.empty_like(query, memory_format=torch.contiguous_format)
        if tables.groups:
            merge(parts, tables.local, self._state)
        else:
            merge(parts, tables.local, out=self._out[0])

    def attend(
        self, slot: int, group: int, run: ChunkRun, query: Tensor, attention: AttentionSpec, rows: SeatRows
    ) -> None:
        """Attends to the group in a ring slot and merges; the last group writes the output."""
        assert self._out is not None
        seats: Seats = self.tables.groups[group]
        parts = self._parts_of(self._staged.splits)
        attend(query[0], self.store.ring[slot], seats, attention.scale, self._staged, parts)
        last = group == len(self.tables.groups) - 1
        merge(parts, seats, self._state, resume=True, out=self._out[0] if last else None)
        if self.store.debug:
            self.store.ring[slot].fill_(float("nan"))

    def merge(self, query: Tensor, attention: AttentionSpec, seats: Rows) -> Tensor:
        """The attention's output, [1, num_heads, N, head_dim] in the query's dtype; zeros for padding."""
        assert self._out is not None
        out, self._out = self._out, None
        return out

    def forget(self) -> None:
        """Drops what a failed round has left."""
        self._own = self._out = None

    def _parts_of(self, count: int) -> AttentionState:
        return AttentionState(self._parts.out[:count], self._parts.lse[:count])
