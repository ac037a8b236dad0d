"""Rounds whose acceptance and drafting run on the device, read by the host once at their end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specstream.cuda_draft import CudaDrafter
from specstream.device_accept import SeatTables, accept_on_device
from specstream.device_draft import DeviceDraft, Kind
from specstream.kernel_settings import KernelSettings
from specstream.scheduler import RequestRows
from specstream.speculate import Candidates, Speculation
from specstream.token_scores import Kept


@dataclass(frozen=True)
class Outcome:
    """What a round has decided about one request."""

    row: RequestRows
    accepted: int
    produced: list[int]
    """Before it is cut; empty if no token can be chosen."""
    logits: Tensor
    """The request's own rows, [rows, vocab]."""
    scores: Tensor
    """The same, processed; float32."""
    candidates: Candidates | None
    """For the next round; None if the device has not drafted after what was produced."""
    draft_failed: bool


class DeviceRounds:
    """Acceptance and draft steps on the device, for rounds in which all requests use nothing but what kernels do."""

    def __init__(
        self,
        speculation: Speculation,
        drafter: CudaDrafter | None,
        depth: int,
        max_seats: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`depth` is the most candidates of a request. A drafter that there are no kernels for is left alone."""
        self.speculation, self.depth, self.max_seats = speculation, depth, max_seats
        self.vocab_size, self.device = vocab_size, device
        self.drafter = drafter if drafter is not None and drafter.choice.has_kernels else None
        self._tables: dict[int, SeatTables] = {}
        self._drafts: dict[int, DeviceDraft] = {}
        self._drawn_from: Tensor | None = None
        """float64 [seats, K, vocab]: what candidates were drawn from, if it matters."""
        self._rows: list[RequestRows] = []
        self._size = 0
        self._kind: Kind = (frozenset(), "coupled")
        self._logits = self._scores = torch.empty(0)
        self._computed: dict[int, int] = {}

    def accept(self, rows: list[RequestRows], logits: Tensor) -> bool:
        """Launches acceptance for the requests whose logits, [R, vocab], these are.

        Returns:
            False, and nothing is launched, if a request wants more than the kernels do.
        """
        given = [KernelSettings.of(row.sequence.sampling) for row in rows if row.sequence.kept == Kept()]
        settings = [setting for setting in given if setting is not None]
        if not rows or len(settings) < len(rows):
            return False
        sampled = any(row.sequence.sampling.do_sample for row in rows)
        method = self.speculation.rejection_sample_method if sampled else "coupled"
        self._kind = frozenset().union(*(setting.used for setting in settings)), method
        highest = max(row.sequence.seat for row in rows)
        self._size = min(1 << highest.bit_length(), self.max_seats)
        self._rows, self._computed = rows, {}
        tables = self._tables_of(self._size)
        drawn_from = self._hold(rows) if method == "standard" else None
        tables.fill(rows, settings, self.speculation)
        synthetic = self.speculation.synthetic is not None
        self._logits = logits
        self._scores = accept_on_device(tables, logits, *self._kind, synthetic, drawn_from)
        return True

    def draft(self, step: int) -> None:
        """Launches draft step `step`, from 0 on."""
        draft = self._draft_of(self._size)
        if step == 0:
            self._computed = draft.begin(self._rows)
        if self._computed:
            standard = self._kind[1] == "standard"
            draft.step(self._kind, self._probabilities()[: self._size] if standard else None)

    def read(self) -> list[Outcome]:
        """Waits for what was launched; says what has become of each request."""
        found = self._tables[self._size].found
        found.download()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        ends = np.cumsum([row.logits for row in self._rows]).tolist()
        return [self._outcome(row, slice(end - row.logits, end)) for row, end in zip(self._rows, ends, strict=True)]

    # Parts

    def _outcome(self, row: RequestRows, own: slice) -> Outcome:
        found, seat = self._tables[self._size].found.host, row.sequence.seat
        accepted = int(found["accepted"][seat])
        produced: list[int] = found["produced"][seat, : accepted + 1].tolist()
        tops = found["tops"][own]
        usable = _leading(np.isfinite(tops) if row.sequence.sampling.do_sample else ~np.isnan(tops))
        candidates, draft_failed = Candidates(), False
        if accepted >= usable:  # then what follows row `usable` means nothing, and see `Speculation.accept`
            accepted, produced, candidates = max(0, usable - 1), produced[:usable], None
            if seat in self._computed:
                self.drafter.go_on(seat, len(row.sequence.tokens), [], [])
        elif seat in self._computed:
            candidates, draft_failed = self._proposed(row, accepted, produced)
        return Outcome(row, accepted, produced, self._logits[own], self._scores[own], candidates, draft_failed)

    def _proposed(self, row: RequestRows, accepted: int, produced: list[int]) -> tuple[Candidates, bool]:
        """The candidates for the next round, and whether the draft's scores became no distribution."""
        found, seat = self._tables[self._size].found.host, row.sequence.seat
        count = int(found["next_count"][seat])
        good = _leading(np.isfinite(found["next_tops"][seat, :count]))
        candidates = Candidates(found["next_candidates"][seat, :good].tolist())
        if self._kind[1] == "standard" and row.sequence.sampling.do_sample:
            candidates.probabilities = list(self._probabilities()[seat].unbind()[:good])
        known = min(self._computed[seat], accepted)
        computed = len(row.sequence.tokens) + known
        if count:
            self.drafter.go_on(seat, computed, produced[known:], candidates.tokens[: count - 1])
        else:
            self.drafter.go_on(seat, computed, [], [])
        return candidates, good < count

    def _probabilities(self) -> Tensor:
        """What candidates were drawn from, float64 [max_seats, K, vocab]."""
        if self._drawn_from is None:
            shape = self.max_seats, self.depth, self.vocab_size
            with torch.inference_mode(False):
                self._drawn_from = torch.empty(shape, dtype=torch.float64, device=self.device)
        return self._drawn_from

    def _hold(self, rows: list[RequestRows]) -> Tensor:
        """The same for the candidates of these rows, also if they were proposed on the host."""
        held = self._probabilities()
        for row in rows:
            for place, given in zip(held[row.sequence.seat], row.candidates.probabilities, strict=False):
                if place.data_ptr() != given.data_ptr():
                    place.copy_(given)
        return held[: self._size]

    def _tables_of(self, seats: int) -> SeatTables:
        if seats not in self._tables:
            self._tables[seats] = SeatTables(seats, self.depth, self.device)
        return self._tables[seats]

    def _draft_of(self, seats: int) -> DeviceDraft:
        if seats not in self._drafts:
            method = self.speculation.draft_sample_method
            self._drafts[seats] = DeviceDraft(self.drafter, self._tables_of(seats), method)
        return self._drafts[seats]


def _leading(good: np.ndarray) -> int:
    """How many come before the first that is not."""
    return len(good) if good.all() else int(good.argmin())
