"""The second model as a drafter: its own KV on the device, whole or a window plus sinks, caught up before it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specstream.batch import FlatRows
from specstream.graph import AttentionSpec, PartitionedModel
from specstream.kernels.attention import pack_query, partial_attention, unpack_output
from specstream.ops import token_major

FEED_TOKENS = 512
"""Rows a catch-up computes at a time for one request."""


@dataclass(frozen=True)
class DraftWindow:
    """Which keys a draft position sees: all, or the latest `window` and the first `sink` ones.

    Positions keep their rotary embedding; those outside are dropped. Storage is a ring behind the sinks.
    """

    capacity: int
    """Tokens a request may reach."""
    window: int | None
    sink: int

    @property
    def storage(self) -> int:
        """Token slots a request needs."""
        if self.window is None:
            return self.capacity
        return min(self.capacity, self.sink + self.window + FEED_TOKENS)

    @property
    def seen(self) -> int:
        """Tokens that a position sees, at most."""
        return self.capacity if self.window is None else min(self.capacity, self.sink + self.window)

    def slots(self, positions: Tensor) -> Tensor:
        """Where positions are stored."""
        if self.storage == self.capacity:
            return positions
        ring = self.storage - self.sink
        return torch.where(positions < self.sink, positions, self.sink + (positions - self.sink) % ring)

    def keys(self, first: int, stop: int, since: int, device: torch.device) -> Tensor:
        """Positions that some query in [first, stop) sees, if those from the sinks to `since` are not computed."""
        if self.window is None:
            return torch.arange(stop, device=device)
        sinks = torch.arange(min(self.sink, stop), device=device)
        recent = torch.arange(min(stop, max(self.sink, since, first - self.window + 1)), stop, device=device)
        return torch.cat([sinks, recent])

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """bool [queries, keys]: which of the key positions each query position sees."""
        seen = key[None] <= query[:, None]
        if self.window is None:
            return seen
        return seen & ((key[None] > query[:, None] - self.window) | (key[None] < self.sink))


@dataclass
class _DraftSeat:
    """What the drafter has computed for the request in a seat. A text only grows: what was agreed on is not kept."""

    agreed: int = 0
    """How many of the tokens that the target has committed."""
    beyond: list[int] = field(default_factory=list)
    """The tokens computed after those: candidates, which may have been committed since."""
    since: int = 0
    """From here on they have been computed, and the sinks; those between were left out."""

    @property
    def length(self) -> int:
        """Tokens whose KV is there, candidates included."""
        return self.agreed + len(self.beyond)

    def align(self, tokens: list[int]) -> None:
        """Forgets what the target did not commit, and leaves at least the last token to compute."""
        self._agree(tokens, len(tokens) - 1)
        self.beyond.clear()

    def follow(self, committed: list[int], proposed: list[int]) -> list[int]:
        """Keeps of what was computed what begins `committed + proposed`; returns what is missing of these."""
        self._agree(committed, len(committed))
        if self.agreed < len(committed):
            self.beyond.clear()
            return committed[self.agreed :] + proposed
        keep = _common(self.beyond, proposed)
        del self.beyond[keep:]
        return proposed[keep:]

    def go_on(self, length: int, committed: list[int], proposed: list[int]) -> None:
        """Notes that behind the first `length` tokens these have been computed."""
        self.agreed, self.beyond = length + len(committed), list(proposed)

    def restart(self, since: int) -> None:
        """Notes that of a text's first `since` tokens the sinks are computed, and the others are left out."""
        self.agreed, self.beyond, self.since = since, [], since

    def _agree(self, committed: list[int], most: int) -> None:
        """Counts what is committed by now, up to `most` tokens."""
        further = _common(self.beyond, committed[self.agreed : most])
        self.beyond = self.beyond[further:] if self.agreed <= most else []
        self.agreed = min(self.agreed + further, most)


def _common(some: list[int], others: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(some), len(others)))


@dataclass(frozen=True)
class Branches:
    """Copies of requests that are drafted for too, in seats after those of requests."""

    count: int = 0
    tokens: int = 0
    """That each computes beyond what it was copied of, at most."""


NO_BRANCHES = Branches()


class Drafter:
    """Computes what comes next for several requests at once; what is made of that is for `speculate`."""

    def __init__(
        self,
        model: PartitionedModel,
        window: DraftWindow,
        vocab_size: int,
        max_seats: int,
        branches: Branches = NO_BRANCHES,
    ) -> None:
        """`max_seats` is how many requests there may be. `vocab_size` is the target's. Where the two differ, the larger
        is padded: the draft's logits are brought to the target's size, and what the draft has no embedding for it reads
        as token 0."""
        self.model, self.window, self.vocab_size, self.max_seats = model, window, vocab_size, max_seats
        self.branches = branches
        self._seats: dict[int, _DraftSeat] = {}
        self._kv: dict[int, Tensor] = {}
        """By seat, [layers, 2, kv_heads, storage, head_dim]."""

    def most_length(self, limit: int) -> int:
        """Length at which nothing more is proposed for a request of up to `limit` tokens.

        The target adds the last token; and what is proposed follows a token that the draft has a position for.
        """
        positions = self.model.spec.max_positions
        return limit - 1 if positions is None else min(limit - 1, positions + 1)

    def knows(self, seat: int) -> bool:
        """Whether anything is computed for the request in a seat."""
        return seat in self._seats

    def fork(self, seat: int, other: int, length: int) -> None:
        """Gives another seat what is computed of the first `length` tokens of the request in this one."""
        state = self._seats[seat]
        agreed = min(state.agreed, length)
        self._seats[other] = replace(state, agreed=agreed, beyond=state.beyond[: length - agreed])
        self._copy_kv(seat, other)

    def _copy_kv(self, seat: int, other: int) -> None:
        self._kv[other] = self._kv[seat].clone()

    def adopt(self, other: int, seat: int) -> None:
        """Has the request in `seat` go on with what is computed in the other seat, which is free then."""
        self._seats[seat], self._kv[seat] = self._seats.pop(other), self._kv.pop(other)

    def free(self, seat: int) -> None:
        """Forgets the request in a seat."""
        self._seats.pop(seat, None)
        self._kv.pop(seat, None)

    def close(self) -> None:
        """Frees the memory of all requests; nothing is drafted any more."""
        self._seats.clear()
        self._kv.clear()

    def start(self, contexts: dict[int, list[int]]) -> dict[int, Tensor]:
        """First draft step: catches up with each request's committed tokens; returns logits [vocab] after them."""
        pending: dict[int, list[int]] = {}
        for seat, tokens in contexts.items():
            state = self._seat(seat)
            state.align(tokens)
            self._leave_out(seat, tokens)
            pending[seat] = tokens[state.length :]
        return self._feed(self._feed_behind(pending), logits=True)

    def extend(self, latest: dict[int, int]) -> dict[int, Tensor]:
        """A further draft step: logits [vocab] after the latest candidate of each request."""
        return self._feed({seat: [token] for seat, token in latest.items()}, logits=True)

    def _seat(self, seat: int) -> _DraftSeat:
        if seat not in self._seats:
            self._seats[seat] = _DraftSeat()
        return self._seats[seat]

    def _leave_out(self, seat: int, tokens: list[int]) -> bool:
        """Leaves out what lies far behind the window, if much of it is still to be computed; says whether it did.

        What is computed next sees the sinks and nothing else before itself. A window later that makes no difference to
        what is seen, and little to what that was computed from.
        """
        state, sinks, block = self._seats[seat], self._sink_tokens, self._block_tokens
        since = 0 if self.window.window is None else (len(tokens) - 2 * self.window.window) // block * block
        if since - max(state.length, sinks) < FEED_TOKENS:
            return False
        if missing := tokens[state.length : sinks]:
            self._feed({seat: missing}, logits=False)
        state.restart(since)
        return True

    @property
    def _sink_tokens(self) -> int:
        """Of a request's first tokens those that stay."""
        return self.window.sink

    @property
    def _block_tokens(self) -> int:
        """What is left out ends at a multiple of it."""
        return 1

    def _feed_behind(self, pending: dict[int, list[int]]) -> dict[int, list[int]]:
        """Computes tokens of requests that are far behind; returns what is left of each, at most `FEED_TOKENS`."""
        while any(len(tokens) > FEED_TOKENS for tokens in pending.values()):
            behind = {seat: tokens for seat, tokens in pending.items() if len(tokens) > FEED_TOKENS}
            self._feed({seat: tokens[:FEED_TOKENS] for seat, tokens in behind.items()}, logits=False)
            pending |= {seat: tokens[FEED_TOKENS:] for seat, tokens in behind.items()}
        return pending

    def _kv_of(self, seat: int) -> Tensor:
        if seat not in self._kv:
            spec = self.model.spec
            shape = (spec.num_layers, 2, spec.num_kv_heads, self.window.storage, spec.head_dim)
            with torch.inference_mode(False):  # it may be used outside of the caller's
                self._kv[seat] = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        return self._kv[seat]

    def _feed(self, rows: dict[int, list[int]], *, logits: bool) -> dict[int, Tensor]:
        """Computes tokens after each request's cached ones; returns the logits after each one's last, if asked."""
        firsts = {seat: self._seats[seat].length for seat in rows}
        readable = {seat: self._readable(tokens) for seat, tokens in rows.items()}
        flat = FlatRows.of((tokens, firsts[seat], int(logits)) for seat, tokens in readable.items())
        values, spans = flat.inputs(self.model.spec.device), dict(zip(rows, flat.places, strict=True))
        for index, piece in enumerate(self.model.pieces):
            if index == len(self.model.sites) and not logits:
                break
            piece.run(values)
            if index < len(self.model.sites):
                site = self.model.sites[index]
                q, k, v = values.pop(site.query), values.pop(site.key), values.pop(site.value)
                values[site.out] = self._attend(site.spec, q, k, v, spans, firsts)
        for seat, tokens in rows.items():
            self._seats[seat].beyond += tokens
        if not logits:
            return {}
        return dict(zip(rows, self.sized(values[self.model.output][0]), strict=True))

    def _readable(self, tokens: list[int]) -> list[int]:
        return [token if token < self.model.spec.vocab_size else 0 for token in tokens]

    def sized(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab] brought to the target's vocabulary."""
        out = logits[:, : self.vocab_size]
        if out.shape[-1] == self.vocab_size:
            return out
        return F.pad(out, (0, self.vocab_size - out.shape[-1]), value=float("-inf"))

    def _attend(
        self,
        attention: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: dict[int, tuple[int, int]],
        firsts: dict[int, int],
    ) -> Tensor:
        out = token_major(query).zero_()
        group = attention.num_heads // attention.num_kv_heads
        for seat, (row, count) in spans.items():
            first, stop = firsts[seat], firsts[seat] + count
            kv = self._kv_of(seat)[attention.layer]
            own = torch.arange(first, stop, device=query.device)
            kv[:, :, self.window.slots(own)] = torch.stack(
                [key[0, :, row : row + count], value[0, :, row : row + count]]
            )
            places = self.window.keys(first, stop, self._seats[seat].since, query.device)
            seen = kv[:, :, self.window.slots(places)] if self.window.window else kv[:, :, :stop]
            mask = self.window.visible(own, places).repeat(group, 1)[:, None]
            packed = pack_query(query[0, :, row : row + count], attention.num_kv_heads)
            state = partial_attention(packed, seen[0][None], seen[1][None], attention.scale, mask)
            out[0, :, row : row + count] = unpack_output(state.out, attention.num_heads)
        return out
