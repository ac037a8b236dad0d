"""Attention of a verification round by the Triton kernels, over buffers that stay where they are.

A layer is a launch for what is on the device, one for each streamed group, and one that merges. Where nothing streams,
the first does it all, unless that is too much to merge for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specstream.attention import Rows
from specstream.batch import RoundBatch, SeatRows
from specstream.graph import AttentionSpec
from specstream.kernels.attention import AttentionState
from specstream.kernels.triton_attend import Merged, OwnRows, Seats, attend
from specstream.kernels.triton_merge import merge
from specstream.kv import DeviceStore
from specstream.ops import token_major
from specstream.round_spec import ChunkRun
from specstream.round_tables import RoundTables, Tilings


class KernelAttention:
    """Does what `LayerAttention` does, with what a round's rows are read from `tables` on the device.

    Every launch leaves partial results in a place of its own; `merge` puts those of a layer together, or hands over
    what `local` has merged.
    """

    def __init__(self, store: DeviceStore, tables: RoundTables, attention: AttentionSpec, tilings: Tilings) -> None:
        """`attention` is any of the model's."""
        self.store, self.tables, self.tilings = store, tables, tilings
        sizes = tables.sizes
        lse = torch.zeros(tilings.parts(sizes), attention.num_heads, sizes.rows, device=store.device)
        self._parts = AttentionState(lse.new_zeros(*lse.shape, store.layout.head_dim), lse)
        counted = sizes.seats, attention.num_kv_heads, tilings.local.row_tiles
        self._arrived = torch.zeros(counted, dtype=torch.int32, device=store.device)
        self._own: tuple[Tensor, Tensor] | None = None
        self._out: Tensor | None = None

    def inputs(self, batch: RoundBatch) -> dict[str, Tensor]:
        """Those of the tables, with logits for every row."""
        return self.tables.inputs

    def append(self, layer: int, key: Tensor, value: Tensor, seats: Rows) -> None:
        """Keeps K and V, [1, kv_heads, N, head_dim], for `local`, which writes them in the same launch."""
        self._own = key[0], value[0]

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None:
        """Attends to what is on the device, and writes the rows' own K and V there; merges, if that is all."""
        assert self._own is not None
        tables, tiling = self.tables, self.tilings.local
        own = OwnRows(*self._own, tables.ancestors, tables.position, tables.append_table)
        self._out = token_major(query) if self.tilings.merged else None
        merged = None if self._out is None else Merged(self._out[0], self._arrived)
        attend(query[0], self.store.blocks[layer], tables.local, attention.scale, tiling, self._parts, own, merged)
        self._own = None

    def attend(
        self, slot: int, group: int, run: ChunkRun, query: Tensor, attention: AttentionSpec, rows: SeatRows
    ) -> None:
        """Attends to the group in a ring slot."""
        seats: Seats = self.tables.groups[group]
        attend(query[0], self.store.ring[slot], seats, attention.scale, self.tilings.staged, self._parts)
        if self.store.debug:
            self.store.ring[slot].fill_(float("nan"))

    def merge(self, query: Tensor, attention: AttentionSpec, seats: Rows) -> Tensor:
        """The attention's output, [1, num_heads, N, head_dim] in the query's dtype; zeros for padding."""
        out, self._out = self._out, None
        if out is None:
            out = token_major(query)
            merge(self._parts, self.tables.local, self.tables.part_count, out[0])
        return out

    def forget(self) -> None:
        """Drops what a failed round has left."""
        self._own = self._out = None
