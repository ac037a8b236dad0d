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
from specstream.load_kernels import ROWS_OF_A_PROMPT, load_kernels, seat_counts
from specstream.scheduler import RequestRows
from specstream.speculate import DRAWN_FROM_DTYPE, Candidates, Speculation
from specstream.streams import on_stream
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


GREEDY: Kind = (frozenset(), "coupled")
"""Rounds in which nobody samples: then all rules are one."""


class DrawnFrom:
    """What the candidates of each seat were drawn from."""

    def __init__(self, seats: int, depth: int, vocab: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.whole = torch.empty(seats, depth, vocab, dtype=DRAWN_FROM_DTYPE, device=device)
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
        beside: bool,
    ) -> None:
        """`depth` is the most candidates of a request; `beside`, whether requests are drafted for that do not verify. A
        drafter that there are no kernels for is left alone."""
        self.speculation, self.depth, self.max_seats = speculation, depth, max_seats
        self.vocab_size, self.device = vocab_size, device
        self.drafter = drafter if drafter is not None and drafter.choice.has_kernels else None
        self._tables: dict[int, SeatTables] = {}
        self._others: dict[int, SeatTables] = {}
        """Of requests that are drafted for while others verify, and of what these may come to."""
        self._beside = beside and self.drafter is not None
        self._looks_ahead = self.drafter is not None and self.drafter.branches.count > 0
        self._drafted_depth, self._guesses = depth + self._looks_ahead, speculation.guesses
        self._most_others = max_seats + (self.drafter.branches.count if self.drafter is not None else 0)
        self._drafts: dict[SeatTables, DeviceDraft] = {}
        self._drawn_from: dict[bool, DrawnFrom] = {}
        """Of requests that verify and, with True, of others: a draft step may write to every seat's."""
        self._rows: list[RequestRows] = []
        self._drafted: list[RequestRows] = []
        self._size = self._others_size = 0
        self._kind: Kind = GREEDY
        self._draft_kind: Kind = self._kind
        self._draft: DeviceDraft | None = None
        """What the round's draft steps are done by, if they are the device's."""
        self._logits: tuple[Tensor, ...] = ()
        """Of each request that verifies, [rows, vocab]."""

    @torch.no_grad()
    def load_kernels(self, dtype: torch.dtype, stream: torch.cuda.Stream | None = None) -> None:
        """Compiles and loads what greedy rounds launch, and captures their draft steps, on seats without requests.

        `dtype` is that of logits; `stream` where this is done, None on the CPU.
        """
        synthetic = self.speculation.synthetic is not None
        with on_stream(stream):
            if self.drafter is not None:
                load_kernels(self.drafter.model, self.drafter.choice, [(1, rows) for rows in ROWS_OF_A_PROMPT])
            for seats in seat_counts(self.max_seats):
                self._size = seats
                tables = self._verifying
                tables.fill([], [], self.speculation)
                rows = seats * (self.depth + 1)
                logits = torch.zeros(rows, self.vocab_size, dtype=dtype, device=self.device)
                accept_on_device(tables, logits, *GREEDY, synthetic, None)
                if self.drafter is not None and not self._looks_ahead:
                    self._draft_of(tables).load_kernels(GREEDY)
            if self._beside and self.drafter is not None:
                self.drafter.load_kernels()
            for seats in sorted({*seat_counts(self.max_seats), self._most_others}) if self._beside else ():
                self._others_size = seats
                self._drafting.fill([], [], self.speculation)
                self._draft_of(self._drafting, known=True).load_kernels(GREEDY)

    def prepare(self, rows: list[RequestRows], drafted: list[RequestRows] | None = None) -> bool:
        """Tells the device about the requests that have logits in a round, all that is known before these are there.

        So nothing has to be copied between the logits and the next candidates: the link is busy then.

        Args:
            drafted: other requests, which are drafted for meanwhile; None: these are, after acceptance.

        Returns:
            False, and nothing is launched, if a request wants more than the kernels do.
        """
        if not rows or not self.serves(rows):
            return False
        settings = _all_settings(rows)
        self._size = self._size_for(rows)
        self._kind = self._draft_kind = self._kind_of(rows, settings)
        self._rows, self._drafted, self._draft = rows, [], None
        if self._kind[1] == "standard":
            self._probabilities(self._verifying).hold(rows)
        tables = self._verifying
        tables.fill(rows, settings, self.speculation)
        if self.drafter is not None and drafted is None:
            self._draft = self._draft_of(tables)
            self._draft.begin(rows)
        elif self.drafter is not None and drafted:
            self._prepare_others(drafted)
        return True

    def serves(self, rows: list[RequestRows]) -> bool:
        """Whether these requests want no more than the kernels do."""
        return len(_all_settings([row for row in rows if row.sequence.kept == Kept()])) == len(rows)

    def _prepare_others(self, drafted: list[RequestRows]) -> None:
        """Tells the device about requests that do not verify, if the kernels do all that they want."""
        settings = _all_settings(drafted)
        if len(settings) == len(drafted):
            self._others_size = self._size_for(drafted)
            tables = self._drafting
            tables.fill(drafted, settings, self.speculation)
            tables.tell_known(drafted)
            self._drafted, self._draft_kind = drafted, self._kind_of(drafted, settings)
            self._draft = self._draft_of(tables, known=True)
            self._draft.begin(drafted)

    @property
    def drafts(self) -> bool:
        """Whether the round's draft steps are the device's."""
        return self._draft is not None

    def accept(self, logits: Tensor) -> None:
        """Launches acceptance for those requests, whose logits, [R, vocab], these are."""
        synthetic = self.speculation.synthetic is not None
        tables = self._verifying
        accept_on_device(tables, logits, *self._kind, synthetic, self._drawn(tables, self._kind))
        self._logits = torch.split(logits, [row.logits for row in self._rows])

    def draft(self) -> None:
        """Launches the next draft step."""
        assert self._draft is not None
        self._draft.step(self._draft_kind, self._drawn(self._draft.tables, self._draft_kind))

    def read(self) -> list[Outcome]:
        """Waits for what was launched; says what has become of each request that has verified."""
        self._verifying.found.download()
        if self._drafted:
            self._drafting.found.download()
        self._synchronize()
        return [self._outcome(*each) for each in zip(self._rows, self._logits, strict=True)]

    def read_drafted(self, row: RequestRows) -> None:
        """Notes what was drafted for a request that did not verify, or for what one could have come to."""
        if self._draft is not None and self._drafted:
            row.next_candidates, row.draft_failed = self._candidates(self._draft, row, len(row.known) - 1, row.known)

    def draft_now(self, drafted: list[RequestRows]) -> bool:
        """Drafts for requests that do not verify, and waits; False, and nothing is done, if they want more."""
        if self.drafter is None or not drafted or len(_all_settings(drafted)) < len(drafted):
            return False
        self._prepare_others(drafted)
        for _ in range(self._drafted_depth):
            self.draft()
        self._drafting.found.download()
        self._synchronize()
        for row in drafted:
            self.read_drafted(row)
        self.forget()
        return True

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def forget(self) -> None:
        """Drops what it knows of a round, which holds memory of the requests."""
        self._rows, self._drafted, self._logits, self._draft = [], [], (), None

    def close(self) -> None:
        """Frees what is kept from one round to the next."""
        self.forget()
        self._drafts.clear()
        self._drawn_from.clear()

    # Parts

    def _outcome(self, row: RequestRows, logits: Tensor) -> Outcome:
        seat, sampled = row.sequence.seat, row.sequence.sampling.do_sample
        found = self._verifying.found.host
        accepted = int(found["accepted"][seat])
        produced: list[int] = found["produced"][seat, : accepted + 1].tolist()
        tops = found["tops"][seat, : row.logits]
        usable = leading(np.isfinite(tops) if sampled else ~np.isnan(tops))
        draft = None if self._drafted else self._draft
        if accepted >= usable:  # what follows row `usable` means nothing; see `Speculation.accept`
            if draft is not None:
                draft.drop(row)
            return Outcome(row, max(0, usable - 1), produced[:usable], logits, None, False)
        if draft is None:
            return Outcome(row, accepted, produced, logits, Candidates(), False)
        return Outcome(row, accepted, produced, logits, *self._candidates(draft, row, accepted, produced))

    def _candidates(
        self, draft: DeviceDraft, row: RequestRows, accepted: int, produced: list[int]
    ) -> tuple[Candidates, bool]:
        """What was proposed for a request, and whether the draft has failed on the way."""
        standard = row.sequence.sampling.do_sample and self._draft_kind[1] == "standard"
        drawn_from = self._probabilities(draft.tables).parts[row.sequence.seat] if standard else []
        found, failed = draft.candidates(row, accepted, produced, drawn_from)
        depth = row.sequence.depth
        if depth is None or len(found.tokens) < depth:
            return found, failed
        return found.first(depth), False  # others may have needed more steps

    @property
    def _verifying(self) -> SeatTables:
        """For as many seats as the round has."""
        if self._size not in self._tables:
            self._tables[self._size] = SeatTables(self._size, self.depth, self.device)
        return self._tables[self._size]

    @property
    def _drafting(self) -> SeatTables:
        """For as many seats as are drafted for beside it."""
        if self._others_size not in self._others:
            made = SeatTables(self._others_size, self._drafted_depth, self.device, self._guesses)
            self._others[self._others_size] = made
        return self._others[self._others_size]

    def _size_for(self, rows: list[RequestRows]) -> int:
        """Seats of the tables for these rows: as many as there can be if there are branches among them."""
        highest = max(row.sequence.seat for row in rows)
        return min(1 << highest.bit_length(), self.max_seats) if highest < self.max_seats else self._most_others

    def _kind_of(self, rows: list[RequestRows], settings: list[KernelSettings]) -> Kind:
        sampled = any(row.sequence.sampling.do_sample for row in rows)
        method = self.speculation.rejection_sample_method if sampled else "coupled"
        return frozenset[str]().union(*(setting.used for setting in settings)), method

    def _drawn(self, tables: SeatTables, kind: Kind) -> Tensor | None:
        """What candidates were drawn from, where the round's rule needs it, float64 [seats, K, vocab]."""
        return self._probabilities(tables).whole[: tables.seats] if kind[1] == "standard" else None

    def _probabilities(self, tables: SeatTables) -> DrawnFrom:
        """Those of all seats that there can be: tables of fewer use the first."""
        others = tables in self._others.values()
        if others not in self._drawn_from:
            seats, depth = (self._most_others, self._drafted_depth) if others else (self.max_seats, self.depth)
            self._drawn_from[others] = DrawnFrom(seats, depth, self.vocab_size, self.device)
        return self._drawn_from[others]

    @property
    def drawn_from_bytes(self) -> int:
        """That distributions take."""
        return sum(kept.whole.nbytes for kept in self._drawn_from.values())

    def _draft_of(self, tables: SeatTables, *, known: bool = False) -> DeviceDraft:
        """`known`: whether what was produced is, before the steps begin."""
        if tables not in self._drafts:
            assert self.drafter is not None
            drawn, accepted = self.speculation.draft_sample_method, self.speculation.rejection_sample_method
            noisy = accepted == "coupled"
            self._drafts[tables] = DeviceDraft(self.drafter, tables, drawn, 1 if known else 2, noisy_guesses=noisy)
        return self._drafts[tables]


def _all_settings(rows: list[RequestRows]) -> list[KernelSettings]:
    """Of the requests for which kernels do all that is wanted."""
    given = (KernelSettings.of(row.sequence.sampling) for row in rows)
    return [setting for setting in given if setting is not None]
