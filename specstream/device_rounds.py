"""Rounds whose acceptance and drafting run on the device, read by the host once at their end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specstream.cuda_draft import CudaDrafter
from specstream.device_accept import SeatTables, accept_on_device
from specstream.device_draft import DeviceDraft, Kind, leading
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
    candidates: Candidates | None
    """For the next round; None if the device has not drafted after what was produced."""
    draft_failed: bool


class DrawnFrom:
    """What the candidates of each seat were drawn from."""

    def __init__(self, seats: int, depth: int, vocab: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.whole = torch.empty(seats, depth, vocab, dtype=torch.float64, device=device)
        self.parts = [list(seat) for seat in self.whole]
        """By seat and candidate, [vocab]."""

    def hold(self, rows: list[RequestRows]) -> None:
        """Has those of these rows' candidates, wherever they were proposed."""
        for row in rows:
            for part, given in zip(self.parts[row.sequence.seat], row.candidates.probabilities, strict=False):
                if part is not given:
                    part.copy_(given)


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
        self._drawn_from: dict[int, DrawnFrom] = {}
        self._rows: list[RequestRows] = []
        self._size = 0
        self._kind: Kind = (frozenset(), "coupled")
        self._drafts_now = False
        self._logits: Tensor | None = None

    def prepare(self, rows: list[RequestRows], *, drafts: bool = True) -> bool:
        """Tells the device about the requests that have logits in a round, all that is known before these are there.

        So nothing has to be copied between the logits and the next candidates: the link is busy then.

        Args:
            drafts: whether candidates are proposed for these requests after acceptance.

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
        self._rows = rows
        if method == "standard":
            self._probabilities().hold(rows)
        self._tables_of(self._size).fill(rows, settings, self.speculation)
        self._drafts_now = drafts and self.drafter is not None
        if self._drafts_now:
            self._draft_of(self._size).begin(rows)
        return True

    def accept(self, logits: Tensor) -> None:
        """Launches acceptance for those requests, whose logits, [R, vocab], these are."""
        synthetic = self.speculation.synthetic is not None
        self._logits = logits
        accept_on_device(self._tables_of(self._size), logits, *self._kind, synthetic, self._drawn())

    def draft(self) -> None:
        """Launches the next draft step."""
        self._draft_of(self._size).step(self._kind, self._drawn())

    def read(self) -> list[Outcome]:
        """Waits for what was launched; says what has become of each request."""
        found = self._tables_of(self._size).found
        found.download()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        assert self._logits is not None
        logits = torch.split(self._logits, [row.logits for row in self._rows])
        outcomes = [self._outcome(*each) for each in zip(self._rows, logits, strict=True)]
        self.forget()
        return outcomes

    def forget(self) -> None:
        """Drops what it knows of a round, which holds memory of the requests."""
        self._rows, self._logits = [], None

    # Parts

    def _outcome(self, row: RequestRows, logits: Tensor) -> Outcome:
        seat, sampled = row.sequence.seat, row.sequence.sampling.do_sample
        found = self._tables_of(self._size).found.host
        accepted = int(found["accepted"][seat])
        produced: list[int] = found["produced"][seat, : accepted + 1].tolist()
        tops = found["tops"][seat, : row.logits]
        usable = leading(np.isfinite(tops) if sampled else ~np.isnan(tops))
        draft = self._draft_of(self._size) if self._drafts_now else None
        if accepted >= usable:  # what follows row `usable` means nothing; see `Speculation.accept`
            if draft is not None:
                draft.drop(row)
            return Outcome(row, max(0, usable - 1), produced[:usable], logits, None, False)
        candidates, draft_failed = Candidates(), False
        if draft is not None:
            standard = sampled and self._kind[1] == "standard"
            drawn_from = self._probabilities().parts[seat] if standard else []
            candidates, draft_failed = draft.candidates(row, accepted, produced, drawn_from)
        return Outcome(row, accepted, produced, logits, candidates, draft_failed)

    def _drawn(self) -> Tensor | None:
        """What candidates were drawn from, where the round's rule needs it, float64 [seats, K, vocab]."""
        return self._probabilities().whole if self._kind[1] == "standard" else None

    def _probabilities(self) -> DrawnFrom:
        """For as many seats as the round has."""
        if self._size not in self._drawn_from:
            self._drawn_from[self._size] = DrawnFrom(self._size, self.depth, self.vocab_size, self.device)
        return self._drawn_from[self._size]

    def _tables_of(self, seats: int) -> SeatTables:
        if seats not in self._tables:
            self._tables[seats] = SeatTables(seats, self.depth, self.device)
        return self._tables[seats]

    def _draft_of(self, seats: int) -> DeviceDraft:
        if seats not in self._drafts:
            assert self.drafter is not None
            method = self.speculation.draft_sample_method
            self._drafts[seats] = DeviceDraft(self.drafter, self._tables_of(seats), method)
        return self._drafts[seats]
