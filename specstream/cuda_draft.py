"""The drafter on a CUDA device: KV in blocks, attention by the kernels, and each size of step a graph of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specstream import block_window
from specstream.attention import Attention, Rows
from specstream.attention_choice import KernelChoice
from specstream.batch import FlatRows, RoundBatch, SeatRows
from specstream.block_window import BlockWindow, blocks_of_branch
from specstream.draft import NO_BRANCHES, Branches, Drafter, DraftWindow
from specstream.graph import PartitionedModel
from specstream.kernel_attention import KernelAttention
from specstream.kv import ChunkLayout, DeviceStore, SequenceKV
from specstream.load_kernels import seat_counts
from specstream.prompt_attention import PromptAttention
from specstream.recurring import GraphPool, Recurring
from specstream.round_spec import SeatSpec
from specstream.table_sizes import TableSizes


class CudaDrafter(Drafter):
    """Computes on the current stream; steps of few rows are captured the second time they occur."""

    def __init__(
        self,
        model: PartitionedModel,
        window: DraftWindow,
        vocab_size: int,
        max_seats: int,
        branches: Branches = NO_BRANCHES,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream` is the one on which steps are captured; None on the CPU."""
        super().__init__(model, window, vocab_size, max_seats, branches)
        self.blocks = BlockWindow.of(window)
        layout = ChunkLayout.of(model.spec, block_window.BLOCK_TOKENS)
        num_blocks = self.blocks.blocks_for(max_seats, branches)
        self.store = DeviceStore(layout, num_blocks, 1, 1, model.spec.device)
        for_prompts = PromptAttention(self.store, num_heads=model.spec.attentions[0].num_heads)
        self.choice = KernelChoice(self.store, model.spec, self.blocks.blocks, for_prompts)
        self._places: dict[int, SequenceKV] = {}
        self._forked: dict[int, dict[int, int]] = {}
        """Of branches: the blocks that are their own, by place; the others are the request's."""
        self.graphs = GraphPool(stream)
        """Of its own steps, and of those that are captured around them."""
        self._steps: dict[TableSizes, Recurring[Tensor]] = {}

    def _copy_kv(self, seat: int, other: int) -> None:
        """Shares the blocks but for those that the branch may write; copies what it may read of these before."""
        place, length = self._place(seat), self._seats[other].length
        spec, sinks = self.blocks.seat(other, length, 1), self.blocks.sink_blocks
        first, most = spec.open, -(-self.window.capacity // block_window.BLOCK_TOKENS)
        blocks, own = list(place.blocks), {}
        for chunk in range(first, min(most, first + blocks_of_branch(self.branches.tokens))):
            at, before = spec.device_slot(chunk), chunk - spec.tail_slots  # whose place it takes, behind the sinks
            (own[at],) = self.store.take(1)
            begun, end = chunk == first and length % block_window.BLOCK_TOKENS, (before + 1) * block_window.BLOCK_TOKENS
            if begun or (before >= sinks <= at and end > length - self.blocks.window):
                self.store.blocks[:, own[at]] = self.store.blocks[:, blocks[at]]
            blocks[at] = own[at]
        self._forked[other] = own
        self._places[other] = replace(place, blocks=blocks)

    def adopt(self, other: int, seat: int) -> None:
        place, branch = self._places[seat], self._places.pop(other)
        self.store.give_back([place.blocks[at] for at in self._forked.pop(other)])
        self._places[seat] = branch
        self._seats[seat] = self._seats.pop(other)

    @property
    def _sink_tokens(self) -> int:
        return self.blocks.sink_blocks * block_window.BLOCK_TOKENS

    @property
    def _block_tokens(self) -> int:
        return block_window.BLOCK_TOKENS

    def free(self, seat: int) -> None:
        super().free(seat)
        place, forked = self._places.pop(seat, None), self._forked.pop(seat, None)
        if place is not None:
            self.store.give_back(place.blocks if forked is None else list(forked.values()))

    def close(self) -> None:
        super().close()
        self._places.clear()
        self._forked.clear()
        self._steps.clear()
        self.store.close()

    def _feed(self, rows: dict[int, list[int]], *, logits: bool) -> dict[int, Tensor]:
        """Computes tokens after each request's cached ones; returns the logits after each one's last, if asked."""
        flat = FlatRows.of((self._readable(tokens), self._seats[seat].length, 1) for seat, tokens in rows.items())
        seats = {seat: SeatRows(self._place(seat), *place) for seat, place in zip(rows, flat.places, strict=True)}
        specs = tuple(
            self.blocks.seat(seat, each.kv.length, each.count, self._seats[seat].since) for seat, each in seats.items()
        )
        output = self._compute(specs, RoundBatch(flat, seats, _ignore, _ignore))
        for seat, tokens in rows.items():
            self._seats[seat].beyond += tokens
        if not logits:
            return {}
        wanted = torch.tensor(flat.wanted).to(output.device, non_blocking=True)
        last = output[0] if output.shape[1] == len(rows) else output[0, wanted]
        return dict(zip(rows, self.sized(last[: len(rows)]), strict=True))

    def catch_up(self, texts: dict[int, tuple[list[int], list[int]]]) -> dict[int, int]:
        """Computes what is missing of each request's committed tokens and of the candidates after them.

        Returns:
            How many of the candidates are computed.
        """
        pending: dict[int, list[int]] = {}
        for seat, (committed, proposed) in texts.items():
            state = self._seat(seat)
            pending[seat] = state.follow(committed, proposed)
            if self._leave_out(seat, committed):
                pending[seat] = committed[state.length :] + proposed
        rest = {seat: tokens for seat, tokens in self._feed_behind(pending).items() if tokens}
        if rest:
            self._feed(rest, logits=False)
        return {seat: self._seats[seat].length - len(committed) for seat, (committed, _) in texts.items()}

    def go_on(self, seat: int, length: int, committed: list[int], proposed: list[int]) -> None:
        """Notes that a request's first `length` tokens are computed, and these after them."""
        self._seats[seat].go_on(length, committed, proposed)

    def places(self, seat: int) -> list[int]:
        """The block of each place of a request, sinks first."""
        return self._place(seat).blocks

    def _place(self, seat: int) -> SequenceKV:
        if seat not in self._places:
            blocks = self.store.take(self.blocks.blocks)
            limit = self.window.capacity
            self._places[seat] = SequenceKV(self.store.layout, limit, self.blocks.sink_blocks, 1, blocks, None)
        place = self._places[seat]
        place.length = self._seats[seat].length
        return place

    def _compute(self, specs: tuple[SeatSpec, ...], batch: RoundBatch) -> Tensor:
        """All pieces and attentions; returns the logits, for the rows asked for or for all."""
        room = next((seats for seats in seat_counts(self.max_seats) if seats >= len(specs)), len(specs))
        kernels = self.choice.kernels_for(specs, (), batch, least_rows=1, least_seats=room)
        rows = {spec.seat: (spec, batch.seats[spec.seat]) for spec in specs}
        if kernels is None:
            return self._run(self.choice.for_prompts, batch, rows)
        return self._step(kernels)()

    def load_kernels(self) -> None:
        """Captures the steps by which up to `max_seats` requests catch up with one token each, on seats without rows.

        Drafting beside the target begins with one whenever all candidates of a request were right.
        """
        for seats in seat_counts(self.max_seats):
            step = self._step(self.choice.attention(self.choice.sizes(seats, (), seats, 1)))
            for _ in range(2):
                step()

    def _step(self, kernels: KernelAttention) -> Recurring[Tensor]:
        sizes = kernels.tables.sizes
        if sizes not in self._steps:
            self._steps[sizes] = Recurring(partial(self._run_kernels, kernels), self.graphs)
        return self._steps[sizes]

    def _run_kernels(self, attention: KernelAttention) -> Tensor:
        attention.tables.upload()
        return self.forward(attention, attention.tables.inputs, {})

    def _run(self, attention: Attention, batch: RoundBatch, rows: Rows) -> Tensor:
        return self.forward(attention, attention.inputs(batch), rows)

    def forward(self, attention: Attention, values: dict[str, Tensor], rows: Rows) -> Tensor:
        """All pieces and attentions, from the model's inputs to the logits."""
        for index, piece in enumerate(self.model.pieces):
            piece.run(values)
            if index < len(self.model.sites):
                site = self.model.sites[index]
                attention.append(index, values.pop(site.key), values.pop(site.value), rows)
                attention.local(index, values[site.query], site.spec, rows)
                values[site.out] = attention.merge(values.pop(site.query), site.spec, rows)
        return values[self.model.output]


def _ignore(_: object) -> None: ...
