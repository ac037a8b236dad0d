"""Proposing and accepting candidates: greedily, by the standard rejection rule, by coupled noise, or for show.

Every rule of acceptance takes the target's processed logits `scores`, float [candidates + 1, vocab], row i being the
target's view after candidate i - 1, and `position`, the index in the text of the first candidate. It returns how many
candidates are accepted, and the tokens produced: those, and one of the target's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specstream.options import Options
from specstream.sampling import Noise, Purpose, Sampling, has_distribution

Accepted = tuple[int, list[int]]

ASSUMED_ACCEPTANCE = 0.8
"""The chance that a candidate is right if those before it are, as long as nothing is known of the texts."""
DRAWN_FROM_DTYPE = torch.float64
"""Of what candidates are drawn from."""
GUESSES = 8
"""Tokens that are noted beside each candidate for `specstream.lookahead`."""


@dataclass(frozen=True)
class SyntheticAcceptance:
    """How many candidates are accepted, whatever they are: to measure what a round costs at a given acceptance.

    One of the two is set.
    """

    rate: float | None = None
    """The chance that a candidate is accepted if those before it are, from 0 to 1."""
    length: float | None = None
    """Mean tokens a round, the target's own included, from 1."""

    def accepted(self, most: int, noise: Noise, position: int) -> int:
        """How many of `most` candidates, of which the first is at `position` of the text."""
        if self.length is not None:
            whole = int(self.length - 1)
            more = float(noise.uniform(position, Purpose.ACCEPT)) < self.length - 1 - whole
            return min(most, whole + more)
        assert self.rate is not None
        accepted = 0
        while accepted < most and float(noise.uniform(position + accepted, Purpose.ACCEPT)) < self.rate:
            accepted += 1
        return accepted


@dataclass
class Candidates:
    """What the draft proposes for one request."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    """What each was drawn from, float64 [vocab]; empty where the rule needs none."""
    guesses: list[list[int]] = field(default_factory=list)
    """The draft's best tokens in the place of each and after the last, the best first; empty unless asked for."""

    def first(self, count: int) -> Candidates:
        return Candidates(self.tokens[:count], self.probabilities[:count], self.guesses[: count + 1])


@dataclass(frozen=True)
class Speculation:
    """How candidates are drawn and accepted when a request samples; greedy requests need no choice."""

    rejection_sample_method: Literal["standard", "coupled"]
    draft_sample_method: Literal["greedy", "probabilistic"]
    synthetic: SyntheticAcceptance | None = None
    """Instead of what the rule says, though that is computed."""
    guesses: int = 0
    """How many of the draft's best tokens are noted beside each candidate."""

    @classmethod
    def of(cls, options: Options) -> Speculation:
        guesses = GUESSES if options.drafting == "lookahead" else 0
        if options.rejection_sample_method != "synthetic":
            return cls(options.rejection_sample_method, options.draft_sample_method, guesses=guesses)
        made_up = SyntheticAcceptance(options.synthetic_acceptance_rate, options.synthetic_acceptance_length)
        return cls("standard", options.draft_sample_method, made_up, guesses)

    def propose(self, sampling: Sampling, logits: Tensor, text: list[int], candidates: Candidates) -> bool:
        """Adds one candidate, from the draft's logits [vocab] after `text` and the candidates so far.

        Returns:
            False if the processed logits are no distribution to draw from; nothing is added then.
        """
        position = len(text) + len(candidates.tokens)
        try:
            scores = sampling.scores(logits.unsqueeze(0), [*text, *candidates.tokens], [])[0]
        except ValueError:  # eta_cutoff refuses what is no distribution
            return False
        if self.guesses:
            candidates.guesses.append(self._guesses(sampling, scores, position))
        if not sampling.do_sample:
            return _propose_best(scores, candidates)
        scores = scores.cpu()  # where the noise is
        if not has_distribution(scores):
            return False
        if self.rejection_sample_method == "coupled":
            noise = sampling.noise.gumbel(position, len(scores)) if self.draft_sample_method == "probabilistic" else 0
            candidates.tokens.append(int((scores.double() + noise).argmax()))
        else:
            drawn_from = torch.softmax(scores.double(), dim=-1)
            if self.draft_sample_method == "greedy":
                drawn_from = torch.zeros_like(drawn_from).index_fill_(0, scores.argmax(), 1.0)
            candidates.tokens.append(sampling.noise.draw(drawn_from, position, Purpose.DRAFT))
            candidates.probabilities.append(drawn_from)
        return True

    def _guesses(self, sampling: Sampling, scores: Tensor, position: int) -> list[int]:
        """The best tokens of scores [vocab]; where it is known, with the noise that the target's own will have."""
        if sampling.do_sample and self.rejection_sample_method == "coupled":
            scores = scores.double().cpu() + sampling.noise.gumbel(position, len(scores))
        best: list[int] = scores.topk(min(self.guesses, len(scores))).indices.tolist()
        return best

    def accept(self, sampling: Sampling, scores: Tensor, position: int, candidates: Candidates) -> Accepted:
        """Verifies candidates, the first at `position`, against the target's scores [candidates + 1, vocab].

        From a row that no token can be chosen from on nothing is produced: then the last token produced is a
        candidate, and none is if that is the first row. A later row may be unusable because of candidates that are
        rejected, so that it is no fault of the text's.
        """
        tokens = candidates.tokens
        if sampling.do_sample:
            scores = scores.cpu()  # where the noise is
        usable = usable_rows(scores, do_sample=sampling.do_sample)
        if usable < len(scores):
            scores = scores.clone()
            scores[usable:] = 0.0  # what the rules make of it is dropped
        if not sampling.do_sample:
            result = accept_greedy(scores, tokens)
        elif self.rejection_sample_method == "coupled":
            result = accept_coupled(scores, tokens, sampling.noise, position)
        else:
            draft = [probabilities.to(scores.device) for probabilities in candidates.probabilities]
            result = accept_standard(scores, tokens, draft, sampling.noise, position)
        if self.synthetic is not None:
            accepted = self.synthetic.accepted(len(tokens), sampling.noise, position)
            result = accepted, [*tokens[:accepted], int(scores[accepted].argmax())]
        accepted, produced = result
        return (accepted, produced) if accepted < usable else (max(0, usable - 1), produced[:usable])


def _propose_best(scores: Tensor, candidates: Candidates) -> bool:
    """Adds the best token of scores [vocab], unless they hold NaN or +inf or are all -inf; reads the device once."""
    index = scores.argmax(-1, keepdim=True)  # of a NaN, if there is one
    token, score = torch.cat((index.double(), scores[index].double())).tolist()
    if not math.isfinite(score):
        return False
    candidates.tokens.append(int(token))
    return True


def usable_rows(scores: Tensor, *, do_sample: bool) -> int:
    """How many of the first rows of scores [rows, vocab] a token can be chosen from.

    When sampling, those that are a distribution. The best score is what it is if others, or all, are infinite, as
    transformers has it; among NaN there is none.
    """
    usable = has_distribution(scores) if do_sample else ~scores.isnan().any(-1)
    return int(usable.int().cumprod(0).sum())


def accept_greedy(scores: Tensor, candidates: list[int]) -> Accepted:
    """Candidates count as long as each is the target's own best token."""
    return _accept_equal(torch.argmax(scores, dim=-1).tolist(), candidates)


def accept_coupled(scores: Tensor, candidates: list[int], noise: Noise, position: int) -> Accepted:
    """Candidates count as long as each is the target's own sample, drawn with the same noise as the draft's.

    The tokens are those that the target alone would sample, whatever was proposed (Gumbel coupling).
    """
    vocab = scores.shape[-1]
    gumbel = torch.stack([noise.gumbel(position + index, vocab) for index in range(len(scores))])
    return _accept_equal(torch.argmax(scores.double() + gumbel.to(scores.device), dim=-1).tolist(), candidates)


def accept_standard(
    scores: Tensor, candidates: list[int], draft_probabilities: list[Tensor], noise: Noise, position: int
) -> Accepted:
    """The rejection rule of speculative sampling (Leviathan et al. 2023): the target's distribution, exactly.

    Args:
        draft_probabilities: for each candidate, what it was drawn from, float64 [vocab].
    """
    target = torch.softmax(scores.double(), dim=-1)
    for index, (candidate, draft) in enumerate(zip(candidates, draft_probabilities, strict=True)):
        wanted, proposed = target[index, candidate], draft[candidate]
        if noise.uniform(position + index, Purpose.ACCEPT) * proposed < wanted:
            continue
        residual = (target[index] - draft).clamp_min(0)
        if not residual.any():  # equal but for rounding
            residual = target[index]
        token = noise.draw(residual, position + index, Purpose.RESIDUAL)
        return index, [*candidates[:index], token]
    last = len(candidates)
    return last, [*candidates, noise.draw(target[last], position + last, Purpose.TOKEN)]


def _accept_equal(chosen: list[int], candidates: list[int]) -> Accepted:
    accepted = 0
    while accepted < len(candidates) and candidates[accepted] == chosen[accepted]:
        accepted += 1
    return accepted, chosen[: accepted + 1]
