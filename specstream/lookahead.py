"""Lookahead: while a request is verified, what may follow is drafted for the likeliest outcomes.

An outcome is how many candidates are accepted, and the target's own token after them. For each that is reckoned with
there is a *branch*: a copy of the request as it would then be, in a seat of the drafter's own, which is drafted for
beside the target. If one of them comes true, its candidates are the next round's. They are the very ones that would be
drafted after acceptance: what is proposed depends on a text and its noise alone. Else drafting follows, exposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from specstream.draft import NO_BRANCHES, Branches, Drafter
from specstream.fan_out import FanOut, Outcome, likely_outcomes
from specstream.options import Options
from specstream.sampling import Purpose
from specstream.scheduler import RequestRows
from specstream.speculate import Candidates


def branches_of(options: Options, fan_out: FanOut) -> Branches:
    """Those that a drafter has to have room for."""
    if options.drafting != "lookahead":
        return NO_BRANCHES
    return Branches(fan_out.branches, options.most_candidates + 2)  # the outcome's token, and all but the last proposed


@dataclass(frozen=True)
class Branch:
    """A request as it may come to be."""

    outcome: Outcome
    row: RequestRows
    """The part of that request which is drafted for."""


@dataclass
class Lookahead:
    """The branches of a round."""

    drafter: Drafter
    first_seat: int
    """Seats of branches come after those of requests."""
    depth: int
    """Candidates of a round, at most. One more is drafted, for what may follow them all."""
    fan_out: FanOut
    _branches: dict[tuple[int, tuple[int, ...]], Branch] = field(default_factory=dict)
    """By request and what it would produce."""

    def begin(self, rows: list[RequestRows]) -> list[RequestRows]:
        """Makes branches of the requests that verify candidates, on the stream that drafts; returns what is drafted
        for."""
        self.end()
        going_on = [row for row in rows if self._may_branch(row)]
        fan_out, seat = self.fan_out.of_each(len(going_on)), self.first_seat
        for row in going_on:
            sequence = row.sequence
            for outcome in likely_outcomes(sequence.acceptance, fan_out, row.candidates):
                if seat == self.first_seat + self.fan_out.branches:
                    break
                produced = (*row.candidates.tokens[: outcome.accepted], outcome.token)
                if outcome.token in sequence.end_tokens or len(sequence.tokens) + len(produced) >= sequence.limit:
                    continue
                branch = Branch(outcome, RequestRows.drafted_only(replace(sequence, seat=seat), produced))
                self._branches[sequence.request_id, produced] = branch
                self.drafter.fork(sequence.seat, seat, len(sequence.tokens) + outcome.accepted)
                seat += 1
        return [branch.row for branch in self._branches.values()]

    def _may_branch(self, row: RequestRows) -> bool:
        """Not if the drafter has lost what it had computed: each branch would compute all of it."""
        return row.sequence.drafts and bool(row.candidates.guesses) and self.drafter.knows(row.sequence.seat)

    def resolve(self, row: RequestRows, read: Callable[[RequestRows], None]) -> Candidates | None:
        """The candidates of the branch that came true, whose seat is now the request's; None if none did.

        `read` notes what was drafted for it: there is no time for the others.
        """
        branch = self._branches.pop((row.sequence.request_id, tuple(row.produced)), None)
        if branch is None:
            return None
        read(branch.row)
        if branch.row.error is not None or branch.row.draft_failed:
            return None
        self.drafter.adopt(branch.row.sequence.seat, row.sequence.seat)
        return branch.row.next_candidates

    def make_up(self, row: RequestRows) -> None:
        """Where acceptance is made up, has the target's own token be a branch's as often as is assumed of real ones."""
        drawn = float(row.sequence.sampling.noise.uniform(len(row.sequence.tokens), Purpose.RESIDUAL))
        for (request_id, _), branch in self._branches.items():
            if request_id == row.sequence.request_id and branch.outcome.accepted == row.accepted:
                drawn -= branch.outcome.share
                if drawn < 0:
                    row.produced[-1] = branch.outcome.token
                    return

    def end(self) -> None:
        """Forgets the branches that did not come true."""
        for seat in range(self.first_seat, self.first_seat + self.fan_out.branches):
            self.drafter.free(seat)
        self._branches.clear()
