"""The draft steps of a round on the device: each reads on the device what the one before has proposed."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from specstream.batch import MIN_ROWS
from specstream.cuda_draft import CudaDrafter
from specstream.device_accept import SeatTables, processed
from specstream.kernel_attention import KernelAttention
from specstream.kernels.accept import Method, propose
from specstream.kernels.draft_rows import ROWS, DraftRows, Verified, Window, place_rows
from specstream.mirror import Mirror
from specstream.recurring import Recurring
from specstream.round_tables import RoundTables, TableSizes
from specstream.scheduler import RequestRows

ROW_STEP = 8
"""Rows are padded to a multiple of it."""

Kind = tuple[frozenset[str], Method]
"""What the steps of a round have in common: the settings that are used, and the rule."""


class DeviceDraft:
    """Proposes for the seats of `tables` what the drafter's own steps would, read by the host afterwards.

    All steps of a kind replay one graph: the number of the step is on the device too.
    """

    def __init__(
        self, drafter: CudaDrafter, tables: SeatTables, draft_sample_method: Literal["greedy", "probabilistic"]
    ) -> None:
        self.drafter, self.tables, self.draft_sample_method = drafter, tables, draft_sample_method
        seats, device, blocks = tables.seats, tables.device, drafter.blocks
        sizes = TableSizes(
            seats=seats,
            rows=-(-seats * ROWS // ROW_STEP) * ROW_STEP,
            blocks=blocks.blocks,
            append_blocks=ROWS,
            groups=0,
            chunks_per_group=1,
        )
        with torch.inference_mode(False):
            reads = RoundTables(sizes, device)
            reads.local.row_start.copy_(torch.arange(seats) * ROWS)
            reads.ancestors[: seats * ROWS, 0] = torch.tensor([1, 3], device=device).repeat(seats)
            self._step = torch.zeros(1, dtype=torch.int64, device=device)
            logit_rows = torch.zeros(max(MIN_ROWS, seats), dtype=torch.int64, device=device)
        self._attention = KernelAttention(drafter.store, reads, drafter.model.spec.attentions[0], ROWS)
        self._inputs = {"input_ids": reads.input_ids, "position_ids": reads.position_ids, "logit_rows": logit_rows}
        self._rows = DraftRows(
            reads.input_ids, reads.position_ids, logit_rows, reads.local, reads.position, reads.append_table
        )
        self._given = Mirror(
            {
                "computed": (torch.int32, (seats,)),
                "most_length": (torch.int64, (seats,)),
                "slots": (torch.int32, (seats, blocks.blocks)),
            },
            device,
        )
        given, found = self._given.device, tables.found.device
        lengths = tables.given.device["positions"]
        self._verified = Verified(
            found["accepted"], found["produced"], lengths, given["computed"], given["most_length"]
        )
        self._window = Window(drafter.store.layout.chunk_tokens, blocks.sink_blocks, blocks.ring_blocks, blocks.window)
        self._steps: dict[Kind, Recurring] = {}

    def begin(self, rows: list[RequestRows]) -> dict[int, int]:
        """Before the first step: the drafter catches up with what the target has already verified or is verifying.

        Returns:
            The seats that are drafted for, and of the candidates of each how many the drafter has computed.
        """
        most = {row.sequence.seat: self._most_length(row) for row in rows}
        texts = {
            row.sequence.seat: (row.sequence.tokens, row.candidates.tokens[:-1])
            for row in rows
            if most[row.sequence.seat]
        }
        computed = self.drafter.catch_up(texts)
        write = self._given.host
        write["most_length"][:] = 0
        for seat, count in computed.items():
            write["computed"][seat], write["most_length"][seat] = count, most[seat]
            write["slots"][seat] = self.drafter.places(seat)
        self._given.upload()
        self._step.zero_()
        return computed

    def step(self, kind: Kind, drawn_from: Tensor | None) -> None:
        """Launches the next step; `drawn_from`, float64 [seats, K, vocab], is written for "standard"."""
        if kind not in self._steps:
            self._steps[kind] = Recurring(partial(self._propose, kind, drawn_from), self.tables.device)
        self._steps[kind]()

    def _propose(self, kind: Kind, drawn_from: Tensor | None) -> None:
        tables, vocab = self.tables, self.drafter.model.spec.vocab_size
        used, method = kind
        slots = self._given.device["slots"]
        place_rows(self._step, self._verified, tables.proposed, slots, self._window, vocab, self._rows)
        logits = self.drafter.forward(self._attention, dict(self._inputs), {})
        scores, tops = processed(self.drafter.sized(logits[0, : tables.seats]), tables.settings(used))
        tables.found.device["next_tops"].index_copy_(1, self._step, tops[:, None])
        propose(tables.proposed, scores, self._step, method, self.draft_sample_method, drawn_from)
        self._step.add_(1)

    def _most_length(self, row: RequestRows) -> int:
        """Length at which nothing more is proposed for a request; 0 if nothing is."""
        sequence = row.sequence
        most = self.drafter.most_length(sequence.limit)
        return most if sequence.drafts and len(sequence.tokens) + 1 < most else 0
