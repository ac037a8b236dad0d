"""What the tasks of a round compute, as far as its structure says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specstream.fan_out import FanOut
from specstream.graph import AttentionSpec, ModelSpec
from specstream.round_spec import RoundSpec, SeatSpec

PIECE_LAUNCHES = 3
"""Small kernels of a piece, such as norms. With it a round of Qwen3-8B with everything resident is predicted to take
4.74 ms on an H200, where its graph takes 4.78."""
LAYER_LAUNCHES = PIECE_LAUNCHES + 3
"""And of a layer of a draft step, which is one task: attention has three."""
SAMPLING_LAUNCHES = 10
"""Of processing logits and choosing from them: in acceptance, and in each draft step."""
FEW_ROWS, MANY_ROWS_SHARE = 16, 0.75
"""A draft step of more rows reads its weights and keys at this share of the rate of a copy: on an H200 one of Qwen3-8B
with 32 branches and a window of 1,024 tokens takes 7.0 ms, and 7.4 beside the target, of which launches are 1.2; one of
Qwen3-0.6B with 64 takes some 3.8, of which they are 0.9."""


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
    fan_out: FanOut | None = None
    """With lookahead: what it serves beside a verification."""

    def rows_of(self, spec: RoundSpec) -> int:
        """That it computes in a round: of each request that verifies, or of each branch beside it. A cohort that is
        drafted for beside another is as large."""
        return self.fan_out.branches if self.fan_out is not None and spec.drafts_beside else len(spec.seats)

    def flops_of(self, rows: int) -> int:
        return 2 * (self.read_bytes // self.itemsize) * rows

    def bytes_of(self, rows: int) -> int:
        """That it reads, of branches of one request too: what they share is more than caches hold. Of many rows as many
        as a copy would read meanwhile."""
        read = self.read_bytes + rows * self.kv_bytes
        return read if rows <= FEW_ROWS else int(read / MANY_ROWS_SHARE)

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
