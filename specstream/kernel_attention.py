"""Attention of a verification round by the Triton kernels, over buffers that stay where they are.

A layer is a launch for what is on the device, one for each streamed group, and one that merges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specstream.attention import Rows
from specstream.batch import RoundBatch, SeatRows
from specstream.graph import AttentionSpec
from specstream.kernels.attention import AttentionState
from specstream.kernels.triton_attend import OwnRows, Seats, attend
from specstream.kernels.triton_merge import merge
from specstream.kv import DeviceStore
from specstream.ops import token_major
from specstream.round_spec import ChunkRun
from specstream.round_tables import RoundTables
from specstream.table_sizes import Tilings


class KernelAttention:
    """Does what `LayerAttention` does, with what a round's rows are read from `tables` on the device.

    Every launch leaves partial results in a place of its own; `merge` puts those of a layer together.
    """

    def __init__(self, store: DeviceStore, tables: RoundTables, attention: AttentionSpec, tilings: Tilings) -> None:
        """`attention` is any of the model's."""
        self.store, self.tables, self.tilings = store, tables, tilings
        sizes = tables.sizes
        lse = torch.zeros(tilings.parts(sizes), attention.num_heads, sizes.rows, device=store.device)
        self._parts = AttentionState(lse.new_zeros(*lse.shape, store.layout.head_dim), lse)
        self._own: tuple[Tensor, Tensor] | None = None

    def inputs(self, batch: RoundBatch) -> dict[str, Tensor]:
        """Those of the tables, with logits for every row; brings to the device what the tables were filled with."""
        self.tables.upload()
        return self.tables.inputs

    def append(self, layer: int, key: Tensor, value: Tensor, seats: Rows) -> None:
        """Keeps K and V, [1, kv_heads, N, head_dim], for `local`, which writes them in the same launch."""
        self._own = key[0], value[0]

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None:
        """Attends to what is on the device, and writes the rows' own K and V there."""
        assert self._own is not None
        tables, tiling = self.tables, self.tilings.local
        own = OwnRows(*self._own, tables.ancestors, tables.position, tables.append_table)
        attend(query[0], self.store.blocks[layer], tables.local, attention.scale, tiling, self._parts, own)
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
        out = token_major(query)
        merge(self._parts, self.tables.local, self.tables.part_count, out[0])
        return out

    def forget(self) -> None:
        """Drops what a failed round has left."""
        self._own = None
