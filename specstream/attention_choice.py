"""Which attention a round on a device uses: the kernels where requests have few rows, a library for long prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from specstream.attention import LayerAttention
from specstream.batch import RoundBatch
from specstream.graph import ModelSpec
from specstream.kernel_attention import KernelAttention
from specstream.kernels.tiling import MAX_OWN_ROWS
from specstream.kv import DeviceStore
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.round_tables import RoundTables
from specstream.table_sizes import TableSizes, Tilings

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
        least = spec.draft_steps + 1 if spec.draft_steps else 0
        return self.kernels_for(spec.seats, spec.groups, batch, least)

    def kernels_for(
        self,
        seats: tuple[SeatSpec, ...],
        groups: tuple[ChunkRun, ...],
        batch: RoundBatch,
        least_rows: int = 0,
        least_seats: int = 0,
    ) -> KernelAttention | None:
        """The same for seats and groups that are no whole round, with room for so many seats and rows of each."""
        if not self.has_kernels:
            return None
        most_rows = max((rows.count for rows in batch.seats.values()), default=0)
        if most_rows > MAX_OWN_ROWS:
            return None
        room = max(len(seats), least_seats)
        rows = max(batch.rows.count, room * least_rows)
        attention = self.attention(self.sizes(room, groups, rows, max(most_rows, least_rows)))
        attention.tables.fill(seats, groups, batch, self.store.layout.chunk_tokens)
        return attention

    def without_rows(self, seats: int, rows_of_seat: int) -> KernelAttention:
        """What rounds of so many seats with so many rows, and one group, use, with empty tables.

        It attends to nothing and writes nothing to the store.
        """
        return self._new(self.sizes(seats, (ChunkRun(0, 0, 0),), seats * rows_of_seat, rows_of_seat))

    def attention(self, sizes: TableSizes) -> KernelAttention:
        """That of rounds of these sizes."""
        if sizes not in self._made:
            self._made[sizes] = self._new(sizes)
        return self._made[sizes]

    def _new(self, sizes: TableSizes) -> KernelAttention:
        own = self.model.attentions[0]
        tilings = Tilings.of(sizes, self.store.layout, own.num_heads)
        return KernelAttention(self.store, RoundTables(sizes, tilings, self.store.device), own, tilings)

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels for the store's dtype and heads on its device."""
        layout = self.store.layout
        small = layout.head_dim < LEAST_HEAD_DIM and self.store.device.type == "cuda"
        return layout.dtype in KERNEL_DTYPES and not small

    def sizes(self, seats: int, groups: tuple[ChunkRun, ...], rows: int, rows_of_seat: int) -> TableSizes:
        """Of the tables of a round of so many rows, and so many of a seat at most."""
        return TableSizes.of(
            self.store.layout,
            self.store.chunks_per_group,
            seats=seats,
            rows=rows,
            rows_of_seat=rows_of_seat,
            blocks=self.most_blocks,
            groups=len(groups),
            groups_per_seat=max(Counter(run.seat for run in groups).values()) if groups else 0,
        )
