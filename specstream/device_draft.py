"""The draft steps of a round on the device: each reads on the device what the one before has proposed."""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specstream.batch import MIN_ROWS, padded_rows
from specstream.cuda_draft import CudaDrafter
from specstream.device_accept import SeatTables
from specstream.kernel_attention import KernelAttention
from specstream.kernels.accept import Best, Method, propose
from specstream.kernels.draft_rows import DraftRows, Verified, Window, place_rows
from specstream.kernels.noisy_scores import noisy_scores
from specstream.kernels.process import process
from specstream.mirror import Mirror
from specstream.recurring import Recurring
from specstream.round_tables import RoundTables
from specstream.scheduler import RequestRows
from specstream.speculate import Candidates
from specstream.table_sizes import TableSizes, Tilings

Kind = tuple[frozenset[str], Method]
"""What the steps of a round have in common: the settings that are used, and the rule."""


class DeviceDraft:
    """Proposes for the seats of `tables` what the drafter's own steps would, read by the host afterwards.

    All steps of a kind replay one graph: the number of the step is on the device too.
    """

    def __init__(
        self,
        drafter: CudaDrafter,
        tables: SeatTables,
        draft_sample_method: Literal["greedy", "probabilistic"],
        rows_of_seat: Literal[1, 2] = 2,
        noisy_guesses: bool = False,
    ) -> None:
        """`rows_of_seat` are two where it is not known what was produced before the first step begins. Guesses are
        noisy if the noise is known by which requests that sample choose their tokens."""
        self.drafter, self.tables, self.draft_sample_method = drafter, tables, draft_sample_method
        self.noisy_guesses = noisy_guesses
        seats, device, blocks = tables.seats, tables.device, drafter.blocks
        sizes = TableSizes(
            seats=seats,
            rows=padded_rows(seats * rows_of_seat),
            rows_per_seat=rows_of_seat,
            blocks=blocks.blocks,
            append_blocks=rows_of_seat,
            groups=0,
            groups_per_seat=0,
            chunks_per_group=1,
        )
        own = drafter.model.spec.attentions[0]
        tilings = Tilings.of(sizes, drafter.store.layout, own.num_heads)
        with torch.inference_mode(False):
            reads = RoundTables(sizes, tilings, device)
            reads.part_count.fill_(tilings.local_parts)
            reads.local.row_start.copy_(torch.arange(seats) * rows_of_seat)
            chain = torch.tensor([1, 3][:rows_of_seat], device=device)
            reads.ancestors[: seats * rows_of_seat, 0] = chain.repeat(seats)
            self._step = torch.zeros(seats, dtype=torch.int64, device=device)
            logit_rows = torch.zeros(max(MIN_ROWS, seats), dtype=torch.int64, device=device)
        self._attention = KernelAttention(drafter.store, reads, own, tilings)
        self._inputs = {"input_ids": reads.input_ids, "position_ids": reads.position_ids, "logit_rows": logit_rows}
        inputs = reads.input_ids, reads.position_ids, logit_rows
        self._rows = DraftRows(rows_of_seat, *inputs, reads.local, reads.position, reads.append_table)
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
        self._steps: dict[Kind, Recurring[None]] = {}
        self._computed: dict[int, int] = {}
        """The seats that are drafted for in this round; and how many candidates of each had been computed before it."""
        self._taken = 0
        """Steps of this round."""

    def begin(self, rows: list[RequestRows]) -> None:
        """Before the first step of a round: the drafter catches up with what the target verifies, or has produced."""
        most = {row.sequence.seat: self._most_length(row) for row in rows}
        texts = {}
        for row in rows:
            tokens = row.sequence.tokens
            if most[row.sequence.seat]:
                text = tokens if row.text_length == len(tokens) else tokens[: row.text_length]  # which may be long
                texts[row.sequence.seat] = text, (row.known or row.candidates.tokens)[:-1]
        self._computed = self.drafter.catch_up(texts)
        write = self._given.host
        write["most_length"][:] = 0
        for seat, count in self._computed.items():
            write["computed"][seat], write["most_length"][seat] = count, most[seat]
            write["slots"][seat] = self.drafter.places(seat)
        self._given.upload()
        self._step.fill_(-1)
        self._taken = 0

    def step(self, kind: Kind, drawn_from: Tensor | None) -> None:
        """Launches the next step; `drawn_from`, float64 [seats, K, vocab], is written for "standard"."""
        self._taken += 1
        if self._computed:
            self._recurring(kind, drawn_from)()

    def load_kernels(self, kind: Kind) -> None:
        """Captures the steps of a kind that draws from no distribution, on seats that are not in the round."""
        for _ in range(2):
            self._step.fill_(-1)
            self._recurring(kind, None)()

    def candidates(
        self, row: RequestRows, accepted: int, produced: list[int], drawn_from: list[Tensor]
    ) -> tuple[Candidates, bool]:
        """What was proposed to follow `produced`, once it can be read; and whether the draft has failed on the way."""
        seat, found = row.sequence.seat, self.tables.found.host
        if seat not in self._computed:
            return Candidates(), False
        count = min(int(found["next_count"][seat]), self._taken)
        good = leading(np.isfinite(found["next_tops"][seat, :count]))
        tokens: list[int] = found["next_candidates"][seat, :good].tolist()
        known = min(self._computed[seat], accepted)
        computed = (produced[known:], tokens[: count - 1]) if count else ([], [])
        self.drafter.go_on(seat, row.text_length + known, *computed)
        return Candidates(tokens, drawn_from[:good], found["guesses"][seat, :good].tolist()), good < count

    def drop(self, row: RequestRows) -> None:
        """Forgets what was proposed for a request, once that is done."""
        if row.sequence.seat in self._computed:
            self.drafter.go_on(row.sequence.seat, row.text_length, [], [])

    def place(self) -> None:
        """Begins the next step: writes what the drafter reads of it."""
        slots, vocab = self._given.device["slots"], self.drafter.model.spec.vocab_size
        place_rows(self._step, self._verified, self.tables.proposed, slots, self._window, vocab, self._rows)

    def _recurring(self, kind: Kind, drawn_from: Tensor | None) -> Recurring[None]:
        if kind not in self._steps:
            self._steps[kind] = Recurring(partial(self._propose, kind, drawn_from), self.drafter.graphs)
        return self._steps[kind]

    def _propose(self, kind: Kind, drawn_from: Tensor | None) -> None:
        tables, (used, method) = self.tables, kind
        self.place()
        logits = self.drafter.forward(self._attention, dict(self._inputs), {})
        scores, best_key = process(self.drafter.sized(logits[0, : tables.seats]), **tables.settings(used))
        guesses = tables.found.device["guesses"]
        if guesses.shape[2]:
            likely = noisy_scores(tables.proposed, scores, self._step[:1]) if self.noisy_guesses else scores
            guesses.index_copy_(1, self._step[:1], likely.topk(guesses.shape[2]).indices[:, None])
        best = Best(best_key, tables.found.device["next_tops"])
        propose(tables.proposed, scores, self._step[:1], method, self.draft_sample_method, drawn_from, best)

    def _most_length(self, row: RequestRows) -> int:
        """Length at which nothing more is proposed for a request; 0 if nothing is."""
        sequence = row.sequence
        most = self.drafter.most_length(sequence.limit)
        return most if sequence.drafts and row.text_length + 1 < most else 0


def leading(good: NDArray[np.bool_]) -> int:
    """How many come before the first that is not."""
    return len(good) if good.all() else int(good.argmin())
