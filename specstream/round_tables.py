"""What the attention kernels read of a verification round, in device buffers that stay where they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specstream.batch import RoundBatch
from specstream.kernels.tiling import MAX_OWN_ROWS
from specstream.kernels.triton_attend import Seats
from specstream.kv import SequenceKV
from specstream.mirror import Mirror
from specstream.round_spec import ChunkRun, SeatSpec
from specstream.table_sizes import TableSizes, Tilings

OF_A_SEAT = ("row_start", "row_count", "key_count", "position", "part_count")
"""Tables with one number a seat."""
SEAT_STEP = 4
"""Rows of a table begin at 16 bytes, or Triton would compile the kernels once more."""


@dataclass
class RoundTables:
    """Rows, lengths and block tables of a round; seats are numbered in the order of `RoundSpec.seats`."""

    sizes: TableSizes
    tilings: Tilings
    device: torch.device
    input_ids: Tensor = field(init=False)
    """int64 [1, rows]"""
    position_ids: Tensor = field(init=False)
    """int64 [1, rows]"""
    logit_rows: Tensor = field(init=False)
    """int64 [rows]: all of them; it never changes."""
    ancestors: Tensor = field(init=False)
    """int64 [rows, 2]: each row sees itself and the rows of its seat before it."""
    local: Seats = field(init=False)
    """The keys on the device."""
    part_count: Tensor = field(init=False)
    """int32 [seats]: partial results that each layer leaves for the seat's rows."""
    groups: tuple[Seats, ...] = field(init=False)
    """The keys of each streamed group, in a ring slot; only the group's own seat has rows."""
    position: Tensor = field(init=False)
    """int32 [seats]: committed tokens, where the seat's first row goes."""
    append_table: Tensor = field(init=False)
    """int32 [seats, append_blocks]"""

    def __post_init__(self) -> None:
        sizes = self.sizes
        one, of_groups = (sizes.seats,), (sizes.groups, -(-sizes.seats // SEAT_STEP) * SEAT_STEP)
        self._mirror = Mirror(
            {
                "input_ids": (torch.int64, (sizes.rows,)),
                "position_ids": (torch.int64, (sizes.rows,)),
                "ancestors": (torch.int64, (sizes.rows, 2)),
                **dict.fromkeys(OF_A_SEAT, (torch.int32, one)),
                "block_table": (torch.int32, (sizes.seats, sizes.blocks)),
                "append_table": (torch.int32, (sizes.seats, sizes.append_blocks)),
                **dict.fromkeys(("group_rows", "group_keys", "group_part"), (torch.int32, of_groups)),
            },
            self.device,
        )
        mine = self._mirror.device
        self.input_ids, self.position_ids = mine["input_ids"][None], mine["position_ids"][None]
        self.logit_rows = torch.arange(sizes.rows, device=self.device)
        self.ancestors, self.position = mine["ancestors"], mine["position"]
        self.append_table, self.part_count = mine["append_table"], mine["part_count"]
        first = torch.zeros(sizes.seats, dtype=torch.int32, device=self.device)
        self.local = Seats(mine["row_start"], mine["row_count"], mine["block_table"], mine["key_count"], first)
        in_order = torch.arange(sizes.chunks_per_group, dtype=torch.int32, device=self.device)
        slot = in_order.repeat(sizes.seats, 1)

        def of_group(name: str, group: int) -> Tensor:
            return mine[name][group, : sizes.seats]

        self.groups = tuple(
            Seats(
                mine["row_start"],
                of_group("group_rows", group),
                slot,
                of_group("group_keys", group),
                of_group("group_part", group),
            )
            for group in range(sizes.groups)
        )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The model's."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "logit_rows": self.logit_rows}

    def fill(
        self, seats: tuple[SeatSpec, ...], groups: tuple[ChunkRun, ...], batch: RoundBatch, chunk_tokens: int
    ) -> None:
        """Writes a round's own values; `upload` brings them to the device."""
        self._mirror.clear()
        write = self._mirror.host
        count = len(batch.rows.tokens)
        write["input_ids"][:count], write["position_ids"][:count] = batch.rows.tokens, batch.rows.positions
        places = {}
        for index, seat in enumerate(seats):
            rows, kv = batch.seats[seat.seat], batch.seats[seat.seat].kv
            places[seat.seat] = index
            write["row_start"][index], write["row_count"][index] = rows.start, rows.count
            write["position"][index] = kv.length
            write["ancestors"][rows.start : rows.stop] = _CHAIN[: rows.count]
            past = _past_blocks(seat, kv, chunk_tokens)
            write["block_table"][index, : len(past)] = past
            write["key_count"][index] = kv.length - seat.streamed * chunk_tokens
            first, last = kv.length // chunk_tokens, (kv.length + rows.count - 1) // chunk_tokens
            target = [kv.blocks[seat.device_slot(chunk)] for chunk in range(first, last + 1)]
            write["append_table"][index, : len(target)] = target
            write["part_count"][index] = self.tilings.local_parts
        for group, run in enumerate(groups):
            index = places[run.seat]
            write["group_part"][group, index] = write["part_count"][index]
            write["part_count"][index] += self.tilings.staged.splits
            write["group_rows"][group, index] = batch.seats[run.seat].count
            write["group_keys"][group, index] = run.count * chunk_tokens

    def upload(self) -> None:
        """Brings what was filled in to the device by one copy, on the current stream or in what it captures.

        Nothing may be filled in before that copy is done.
        """
        self._mirror.upload()


def _chain() -> Tensor:
    """int64 [MAX_OWN_ROWS, 2]: row j sees rows 0 to j."""
    seen = torch.ones(MAX_OWN_ROWS, MAX_OWN_ROWS, dtype=torch.int64).tril().view(MAX_OWN_ROWS, 2, 64)
    return (seen << torch.arange(64)).sum(-1)


_CHAIN = _chain().numpy()


def _past_blocks(seat: SeatSpec, kv: SequenceKV, chunk_tokens: int) -> list[int]:
    """Device blocks of the committed tokens that are not fetched, the open one last."""
    chunks = -(-kv.length // chunk_tokens)
    past = [*range(min(seat.resident, chunks)), *range(seat.on_host.stop, chunks)]
    return [kv.blocks[seat.device_slot(chunk)] for chunk in past]
