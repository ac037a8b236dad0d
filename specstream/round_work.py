"""What the tasks of a round compute, as far as its structure says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specstream.graph import AttentionSpec, ModelSpec
from specstream.round_spec import RoundSpec, SeatSpec

PIECE_LAUNCHES = 3
"""Small kernels of a piece, such as norms. With it a round of Qwen3-8B with everything resident is predicted to take
4.74 ms on an H200, where its graph takes 4.78."""
LAYER_LAUNCHES = PIECE_LAUNCHES + 3
"""And of a layer of a draft step, which is one task: attention has three."""
SAMPLING_LAUNCHES = 10
"""Of processing logits and choosing from them: in acceptance, and in each draft step."""


@dataclass(frozen=True)
class DraftWork:
    """What one draft step is: a pass of a model for a token of each request."""

    read_bytes: int = 0
    """Of weights."""
    layers: int = 0
    itemsize: int = 2
    """Bytes of a weight."""
    kv_bytes: int = 0
    """Of keys and values that it reads for each row, at most."""
    rows: int = 0
    """That it computes, where these are more than one for each request."""

    def flops_of(self, requests: int) -> int:
        """Of so many requests."""
        return 2 * (self.read_bytes // self.itemsize) * max(self.rows, requests)

    def bytes_of(self, requests: int) -> int:
        """That it reads, of branches of one request too: what they share is more than caches hold."""
        return self.read_bytes + max(self.rows, requests) * self.kv_bytes

    @property
    def launches(self) -> int:
        """A step of Qwen3-0.6B, 28 layers, is predicted to take 1.22 ms on an H200 with a window of
        1,024 tokens, where it takes 1.21 to 1.26."""
        return LAYER_LAUNCHES * self.layers + PIECE_LAUNCHES + SAMPLING_LAUNCHES


NO_DRAFT = DraftWork()


@dataclass(frozen=True)
class RoundWork:
    """Floating-point operations; a multiplication and the addition that goes with it are two.

    How many rows a request has is data. So a verification is reckoned with all the rows that it may have, and a part
    of a prompt with all that fit into its chunks. A part of no more chunks than a verification has looks like one.
    """

    spec: RoundSpec
    model: ModelSpec
    verified_rows: int
    """Of a verification, at most: the target's latest token and the candidates."""

    @cached_property
    def chunk_tokens(self) -> int:
        return self.spec.bytes_per_chunk // self.model.kv_bytes_per_token_layer

    @cached_property
    def rows(self) -> dict[int, int]:
        """By seat."""
        return {seat.seat: self._rows(seat) for seat in self.spec.seats}

    @cached_property
    def logit_rows(self) -> int:
        """Rows that the output head sees: of a part of a prompt the last one."""
        return sum(1 if self._is_prompt(seat) else self.verified_rows for seat in self.spec.seats)

    def piece(self, index: int, weight_bytes: int) -> int:
        """Piece `index`. Most of the last one's weights are the output head's: it is reckoned with the head's rows."""
        last = index == self.spec.num_layers
        return self._linear(weight_bytes, self.logit_rows if last else sum(self.rows.values()))

    def local(self, attention: AttentionSpec, seat: SeatSpec, chunks: int) -> int:
        """A request's rows over its chunks on the device: of those that the rows lie in they see half on average."""
        return self._attention(attention, seat.seat, chunks * self.chunk_tokens - seat.span * self.chunk_tokens // 2)

    def attend(self, attention: AttentionSpec, seat: int, chunks: int) -> int:
        """A request's rows over chunks that were fetched."""
        return self._attention(attention, seat, chunks * self.chunk_tokens)

    def _linear(self, weight_bytes: int, rows: int) -> int:
        return 2 * rows * (weight_bytes // self.model.dtype.itemsize)

    def _attention(self, attention: AttentionSpec, seat: int, keys: int) -> int:
        """Scores, and the values they weigh."""
        return 2 * 2 * self.rows[seat] * attention.num_heads * attention.head_dim * keys

    def _rows(self, seat: SeatSpec) -> int:
        if not self._is_prompt(seat):
            return self.verified_rows
        # In its own blocks it is given one chunk more, for a start within the first.
        chunks = seat.span - 1 if seat.buffer_start is None else seat.span
        return chunks * self.chunk_tokens

    def _is_prompt(self, seat: SeatSpec) -> bool:
        most_of_verification = 1 + -(-(self.verified_rows - 1) // self.chunk_tokens)
        return seat.buffer_start is not None or seat.span > most_of_verification
