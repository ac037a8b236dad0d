"""Speculation for the requests of a round: acceptance, drafting, and turning off drafts that are of no use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from specstream.caller import warn_caller
from specstream.depth import Depths
from specstream.draft import Drafter
from specstream.errors import InvalidDistribution, add_note
from specstream.lookahead import Lookahead
from specstream.scheduler import RequestRows
from specstream.sequence import Sequence
from specstream.speculate import Candidates, Speculation
from specstream.token_scores import TokenScores

if TYPE_CHECKING:
    from specstream.device_rounds import DeviceRounds, Outcome

MOST_USELESS_ROUNDS = 16
"""Rounds without one accepted candidate after which a request is decoded without candidates."""
JUDGED_ROUNDS = 32
"""Rounds after which it is asked whether candidates are worth the time that they take."""
LEAST_WORTH = 0.8
"""Part of that time: it is a prediction."""
ADAPTED_ROUNDS = 8
"""Verifications of a request after which it is asked anew how many candidates pay."""


@dataclass
class Speculator:
    """What a round's acceptance and draft steps do. Nothing is committed here: the round may still fail.

    A round is `prepare`, `accept`, the draft steps, `settle`. On a device the kernels do all of it if every request's
    settings are theirs: then acceptance and drafts are only launched, and `settle` waits for them. The tokens are the
    same.
    """

    speculation: Speculation
    drafter: Drafter | None
    candidates: int
    """Of a request, at most."""
    kernels: DeviceRounds | None = None
    lookahead: Lookahead | None = None
    """Drafts for likely outcomes beside the target, if that is the policy."""
    depths: Depths | None = None
    """How many candidates pay, if each request is drafted for as its own acceptance says."""
    pending_warnings: list[tuple[Sequence, str]] = field(default_factory=list)
    """What `warn` has still to say."""
    _verified: list[RequestRows] = field(default_factory=list, init=False)
    """The round's requests that have logits."""
    _drafted: list[RequestRows] = field(default_factory=list, init=False)
    """What its draft steps are for."""
    _on_device: bool = field(default=False, init=False)
    """Whether the round is the kernels'."""
    _beside: bool = field(default=False, init=False)
    """Whether its draft steps are for other requests than it verifies, or for what these may come to."""

    def draft_steps(self, running: list[Sequence]) -> int:
        """Of a round of these requests: as many as the one needs that needs most."""
        if self.drafter is None:
            return 0
        return max((self._steps_of(s) for s in running if s.drafts), default=self.candidates + self._steps_beyond)

    def _steps_of(self, sequence: Sequence) -> int:
        return (sequence.depth or self.candidates) + self._steps_beyond

    @property
    def _steps_beyond(self) -> int:
        """Lookahead needs one more than candidates, for what may follow them all."""
        return int(self.lookahead is not None)

    def prepare(self, rows: list[RequestRows], drafted: list[RequestRows] | None = None) -> bool:
        """Before a round's logits are there: finds out whether the round is the kernels'.

        Args:
            drafted: other requests, for which candidates are proposed meanwhile, with lookahead none; None: they are
                proposed for these afterwards.

        Returns:
            Whether `accept` and what comes after it will not wait for the device.
        """
        self._beside = drafted is not None
        if drafted is not None and self.lookahead is not None:
            by_host = self.kernels is not None and not self.kernels.serves([row for row in rows if row.logits])
            drafted = [] if by_host else self.lookahead.begin(rows)  # the host would take too long for all branches
        self._drafted = rows if drafted is None else drafted
        verified = self._verified = [row for row in rows if row.logits]
        self._on_device = self.kernels is not None and self.kernels.prepare(verified, drafted)
        return self._on_device and not self._drafts_on_host

    def accept(self, rows: list[RequestRows], logits: Tensor) -> None:
        """Decides what each request produced, from logits [R, vocab]; what goes wrong for one is noted in its row."""
        if self._on_device:
            assert self.kernels is not None
            self.kernels.accept(logits)
            if self._drafts_on_host:  # the drafter must know what was accepted
                self._read()
            return
        at = 0
        for row in rows:
            if row.logits:
                try:
                    self._accept(row, logits[at : at + row.logits])
                except Exception as error:  # of the caller's own criteria and processors above all
                    _fail(row, error)
                at += row.logits

    def _accept(self, row: RequestRows, own: Tensor) -> None:
        sequence = row.sequence
        scores = sequence.sampling.scores(own, sequence.tokens, row.candidates.tokens)
        accepted, produced = self.speculation.accept(sequence.sampling, scores, len(sequence.tokens), row.candidates)
        _take(row, own, scores, accepted, produced)

    def draft(self, step: int) -> None:
        """One draft step for every request that goes on and has room for one more candidate."""
        if self._on_device and self.kernels is not None and self.kernels.drafts:
            self.kernels.draft()
        else:
            self._draft(self._drafted, step)

    def _draft(self, rows: list[RequestRows], step: int) -> None:
        assert self.drafter is not None
        wanted = {row.sequence.seat: row for row in rows if self._has_room(row, step)}
        if not wanted:
            return
        if step == 0:
            logits = self.drafter.start({s: r.sequence.tokens + r.produced for s, r in wanted.items()})
        else:
            logits = self.drafter.extend({s: r.next_candidates.tokens[-1] for s, r in wanted.items()})
        for seat, row in wanted.items():
            text = row.sequence.tokens + row.produced
            try:
                proposed = self.speculation.propose(row.sequence.sampling, logits[seat], text, row.next_candidates)
            except Exception as error:
                _fail(row, error)
            else:
                row.draft_failed = not proposed

    def settle(self) -> None:
        """Waits for what the kernels have been given in this round, and notes what came out."""
        self._read()
        if self.lookahead is not None:
            self._settle_branches(self.lookahead)
        elif self._beside:
            for row in self._drafted:
                self._read_drafted(row)
        self._verified = self._drafted = []  # which hold memory of the requests
        if self.kernels is not None:
            self.kernels.forget()

    def _read_drafted(self, row: RequestRows) -> None:
        """Notes what the kernels have drafted for a request that did not verify."""
        if self.kernels is not None:
            self.kernels.read_drafted(row)

    def _read(self) -> None:
        if not self._on_device:
            return
        assert self.kernels is not None
        self._on_device = False
        for outcome in self.kernels.read():
            try:
                self._settle(outcome)
            except Exception as error:
                _fail(outcome.row, error)

    def _settle_branches(self, lookahead: Lookahead) -> None:
        """Gives each request the candidates that were drafted for its outcome, or drafts them now."""
        missed = []
        for row in self._verified:
            going_on = row.produced and not row.finish_reason and row.sequence.drafts
            if going_on and self.speculation.synthetic is not None:
                lookahead.make_up(row)
            foreseen = lookahead.resolve(row, self._read_drafted) if going_on else None
            if going_on and row.candidates.tokens:
                row.foreseen = foreseen is not None
            if foreseen is not None:
                row.next_candidates = foreseen.first(lookahead.depth)
            elif going_on:
                missed.append(row)
        lookahead.end()
        late = [RequestRows.drafted_only(row.sequence, row.produced) for row in missed]
        if self.kernels is None or not self.kernels.draft_now(late):
            for step in range(lookahead.depth + 1 if late else 0):
                self._draft(late, step)
        for row, drafted in zip(missed, late, strict=True):
            row.next_candidates, row.draft_failed = drafted.next_candidates.first(lookahead.depth), drafted.draft_failed
            row.error = row.error or drafted.error

    def _settle(self, outcome: Outcome) -> None:
        row, logits = outcome.row, outcome.logits
        sequence = row.sequence
        # Looked at only if no token can be chosen: those of the kernels do not show why.
        scores = logits if outcome.produced else sequence.sampling.scores(logits[:1], sequence.tokens, [])
        _take(row, logits, scores, outcome.accepted, outcome.produced)
        if row.finish_reason:
            return
        if outcome.candidates is not None:
            row.next_candidates, row.draft_failed = outcome.candidates, outcome.draft_failed
        elif self.kernels is not None and self.kernels.drafter is not None and not self._beside:
            for step in range(self.kernels.depth):
                self._draft([row], step)

    def judge(self, row: RequestRows, price: Callable[[float], float]) -> None:
        """Turns speculation off for a request whose candidates have long been of no use, or not worth their time.

        Args:
            price: how much longer a round is predicted to take with draft steps than without, as a quotient; where that
                certainly is no more than what is given, maybe what it is at most. It does not depend on how long rounds
                have taken. It does on the device's profile: where that is measured, the tokens of a request that
                samples are the same again as long as the profile is kept.
        """
        sequence = row.sequence
        if self.speculation.synthetic is not None or not sequence.drafts:
            return
        if row.accepted:
            sequence.useless_rounds = 0
        elif row.candidates.tokens or row.draft_failed:
            sequence.useless_rounds += 1
        if row.candidates.tokens:
            sequence.judged_rounds += 1
            sequence.judged_accepted += row.accepted
            if self.depths is not None and sequence.metrics.num_verify_rounds % ADAPTED_ROUNDS == 0:
                sequence.depth = self.depths.best(sequence.acceptance)
        if sequence.useless_rounds >= MOST_USELESS_ROUNDS:
            failed = " (its scores are no distribution: NaN, for example)" if row.draft_failed else ""
            self._turn_off(sequence, f"the draft was of no use in {MOST_USELESS_ROUNDS} rounds in a row{failed}")
        elif sequence.judged_rounds >= JUDGED_ROUNDS:
            tokens = 1 + sequence.judged_accepted / sequence.judged_rounds
            sequence.judged_rounds = sequence.judged_accepted = 0
            if tokens < LEAST_WORTH * price(tokens / LEAST_WORTH):
                cost = f"each takes {price(0.0):.2f} x as long with it"
                reason = f"the draft gave {tokens:.2f} tokens in each of {JUDGED_ROUNDS} rounds; {cost}"
                self._turn_off(sequence, reason)

    def _turn_off(self, sequence: Sequence, reason: str) -> None:
        sequence.drafts = False
        text = f"{reason}: speculation is off for request {sequence.request_id}, whose text is not affected"
        self.pending_warnings.append((sequence, text))

    def warn(self) -> list[tuple[Sequence, Warning]]:
        """Says what `judge` found, once all of a round is noted; returns the warnings that are errors by a filter."""
        errors = []
        while self.pending_warnings:
            sequence, text = self.pending_warnings.pop(0)
            try:
                warn_caller(text)
            except Warning as error:
                errors.append((sequence, error))
        return errors

    def forget(self, sequence: Sequence) -> None:
        """Drops what the drafter has computed for a request; it computes that again if it drafts for it."""
        if self.drafter is not None:
            self.drafter.free(sequence.seat)
        if self.lookahead is not None:
            self.lookahead.end()
        if self.kernels is not None:
            self.kernels.forget()
            if sequence.candidates.probabilities:  # a round that failed may have overwritten them
                sequence.candidates = Candidates()

    def close(self) -> None:
        """Frees the memory of drafts."""
        if self.kernels is not None:
            self.kernels.close()
        if self.drafter is not None:
            self.drafter.close()

    @property
    def _drafts_on_host(self) -> bool:
        """Whether draft steps after acceptance are none of the kernels'."""
        kernels_draft = self.kernels is not None and self.kernels.drafter is not None
        return self.drafter is not None and not self._beside and not kernels_draft

    def _has_room(self, row: RequestRows, step: int) -> bool:
        """Whether the request goes on and has a place for candidate `step`, in its limit and the draft's positions."""
        assert self.drafter is not None
        if (row.verifies and not row.produced) or row.finish_reason or row.draft_failed or not row.sequence.drafts:
            return False
        length = len(row.sequence.tokens) + len(row.produced)
        return step < self._steps_of(row.sequence) and length + step < self.drafter.most_length(row.sequence.limit)


def _take(row: RequestRows, own: Tensor, scores: Tensor, accepted: int, produced: list[int]) -> None:
    """Notes what a request produced, as far as it counts; its logits and processed scores are [rows, vocab]."""
    sequence = row.sequence
    if not produced:
        raise _no_token(sequence, own[0], scores[0])
    row.produced, row.finish_reason = sequence.cut(produced, scores)
    row.accepted = min(accepted, len(row.produced))
    row.token_scores = TokenScores.of(sequence.kept, own, scores, row.produced)


def _fail(row: RequestRows, error: Exception) -> None:
    """Notes an error of one request, for which nothing of this round counts then."""
    add_note(error, f"raised while the tokens of request {row.sequence.request_id} were chosen")
    row.error, row.accepted, row.produced, row.finish_reason = error, 0, [], None


def _no_token(sequence: Sequence, logits: Tensor, scores: Tensor) -> InvalidDistribution:
    """Why no token can be chosen from processed scores [vocab], made from the model's logits [vocab]."""
    way_out = "Look at the processors and their settings."
    if logits.isnan().any():
        reason, way_out = (
            "the target's own logits hold NaN",
            "Look at the model; remove_invalid_values=True reads them as 0.",
        )
    elif scores.isnan().any():
        reason = "the processed scores hold NaN"
    elif (scores == float("inf")).any():
        reason, way_out = "the processed scores hold +inf", "Raise the temperature, or look at the processors."
    else:
        reason, way_out = "the processed scores are all -inf", "Forbid fewer tokens, or raise the temperature."
    return InvalidDistribution(sequence.request_id, len(sequence.tokens), reason, way_out)
