"""Which attention a round on a device uses: the kernels where requests have few rows, a library for long prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from specstream.attention import LayerAttention
from specstream.batch import RoundBatch, padded_rows
from specstream.graph import ModelSpec
from specstream.kernel_attention import KernelAttention
from specstream.kernels.triton_attend import MAX_OWN_ROWS
from specstream.kv import DeviceStore
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.round_tables import RoundTables, TableSizes, Tilings

LEAST_HEAD_DIM = 16
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class KernelChoice:
    """Makes tables and attention for each kind of round once, and fills the tables for a round."""

    store: DeviceStore
    model: ModelSpec
    most_blocks: int
    """Device blocks that one request may have."""
    for_prompts: LayerAttention
    _made: dict[TableSizes, KernelAttention] = field(default_factory=dict)

    def kernels(self, spec: RoundSpec, batch: RoundBatch) -> KernelAttention | None:
        """The kernels' attention with its tables filled, or None if they cannot compute the round.

        That is for float64, if heads are too small for a device's matrix units, if a request has too many rows, or if
        rows of the round are written to the host in it: the kernels write them to the device later than the plan's
        append, which that copy waits for.
        """
        if any(seat.offload and seat.offloaded.stop > seat.open for seat in spec.seats):
            return None
        # As many rows as if all had the most candidates: those that are missing, as at the end of a text, cost nothing.
        least = len(spec.seats) * (spec.draft_steps + 1) if spec.draft_steps else 0
        return self.kernels_for(spec.seats, spec.groups, batch, least)

    def kernels_for(
        self, seats: tuple[SeatSpec, ...], groups: tuple[ChunkRun, ...], batch: RoundBatch, least_rows: int = 0
    ) -> KernelAttention | None:
        """The same for seats and groups that are no whole round, with room for `least_rows` rows."""
        if not self.has_kernels:
            return None
        if any(rows.count > MAX_OWN_ROWS for rows in batch.seats.values()):
            return None
        sizes = self.sizes(seats, groups, max(batch.rows.count, least_rows))
        attention = self._made.get(sizes)
        if attention is None:
            own = self.model.attentions[0]
            tilings = Tilings.of(sizes, self.store.layout, own.num_heads, min(MAX_OWN_ROWS, sizes.rows))
            tables = RoundTables(sizes, tilings, self.store.device)
            attention = self._made[sizes] = KernelAttention(self.store, tables, own, tilings)
        attention.tables.fill(seats, groups, batch, self.store.layout.chunk_tokens)
        return attention

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels for the store's dtype and heads on its device."""
        layout = self.store.layout
        small = layout.head_dim < LEAST_HEAD_DIM and self.store.device.type == "cuda"
        return layout.dtype in KERNEL_DTYPES and not small

    def sizes(self, seats: tuple[SeatSpec, ...], groups: tuple[ChunkRun, ...], rows: int) -> TableSizes:
        """Of the tables of a round."""
        return TableSizes(
            seats=len(seats),
            rows=padded_rows(rows),
            blocks=self.most_blocks,
            append_blocks=1 + -(-MAX_OWN_ROWS // self.store.layout.chunk_tokens),
            groups=len(groups),
            groups_per_seat=max(Counter(run.seat for run in groups).values()) if groups else 0,
            chunks_per_group=self.store.chunks_per_group,
        )
