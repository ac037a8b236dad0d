"""Work memory: what an engine's computations take on a device of its own, beside weights and KV.

Each term is what the code allocates there. Work that comes one after the other shares its memory, as torch's allocator
lets it, so that the largest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specstream.batch import padded_rows
from specstream.block_window import BLOCK_TOKENS, BlockWindow
from specstream.draft import FEED_TOKENS
from specstream.graph import ModelSpec
from specstream.kernels.tiling import MAX_OWN_ROWS
from specstream.kv import ChunkLayout
from specstream.table_sizes import TableSizes, Tilings

LIBRARY_BYTES = 32 << 20
"""That torch keeps for cuBLAS, for each stream on which it multiplies matrices: measured on an H200."""
OWN_STREAMS, DRAFT_STREAMS = 3, 2
"""Streams that multiply: the caller's, on which models are captured, the target's, and the one on which its rounds are
captured; with a draft also the draft's and the one on which draft steps are captured."""
ACCUMULATED, SCORE = 4, 4
"""Bytes of a number in partial results of attention, and among processed logits: float32."""


def piece_bytes(spec: ModelSpec) -> int:
    """Of a row in a piece, where its MLP multiplies gate and up: beside these and their product the attention's output
    and the residual that the piece began with, the new residual, and its norm."""
    attended = spec.attentions[0].num_heads * spec.head_dim
    return (attended + 3 * spec.hidden_size + 3 * spec.intermediate_size) * spec.dtype.itemsize


def prompt_attention_bytes(spec: ModelSpec) -> int:
    """Of a row of a prompt's attention, where a library's state, its own or another part's, is merged into one that
    accumulates: beside these three the query, the row's own K and V, and the residual."""
    attended, size = spec.attentions[0].num_heads * spec.head_dim, spec.dtype.itemsize
    return attended * (3 * size + ACCUMULATED) + spec.hidden_size * size + spec.kv_bytes_per_token_layer


def state_bytes(spec: ModelSpec, layout: ChunkLayout, sizes: TableSizes) -> int:
    """Of the partial results that the attention kernels leave for rounds of these sizes."""
    heads = spec.attentions[0].num_heads
    parts = Tilings.of(sizes, layout, heads).parts(sizes)
    return parts * heads * sizes.rows * (spec.head_dim + 1) * ACCUMULATED


@dataclass(frozen=True)
class DraftShape:
    """What the work memory of a drafter depends on."""

    spec: ModelSpec
    window: BlockWindow
    seats: int
    """Requests, and branches of them, that one step drafts for at most."""


@dataclass(frozen=True)
class WorkMemory:
    """Bytes of work memory, by what an engine is to do."""

    spec: ModelSpec
    layout: ChunkLayout
    request_tokens: int
    """Of the longest request."""
    requests: int
    group_chunks: int
    """Of a group at most."""
    verified: int
    """Requests that verify in a round, each with so many rows."""
    rows_of_seat: int
    draft: DraftShape | None

    def bytes(self, prompt_rows: int) -> int:
        """All of it, where a round computes so many rows of prompts at most."""
        rows = min(prompt_rows, self.requests * self.request_tokens)
        return self.kept + max(self.prompts(rows), self.verification, self.drafting)

    @property
    def least(self) -> int:
        """Where a round computes a chunk of prompts: the least that is planned."""
        return self.bytes(self.layout.chunk_tokens)

    @cached_property
    def tables(self) -> TableSizes:
        """Of a verification of the longest requests, all of which stream."""
        chunks = self.layout.chunks_of(self.request_tokens)
        groups = -(-chunks // self.group_chunks)
        return TableSizes.of(
            self.layout,
            self.group_chunks,
            seats=self.verified,
            rows=self.verified * self.rows_of_seat,
            rows_of_seat=self.rows_of_seat,
            blocks=chunks,
            groups=self.verified * groups,
            groups_per_seat=groups,
        )

    @cached_property
    def kept(self) -> int:
        """What stays from one round to the next: of libraries, of the attention kernels, logits that a graph writes."""
        libraries = OWN_STREAMS * LIBRARY_BYTES
        kept = libraries + state_bytes(self.spec, self.layout, self.tables) + self.logits(self.tables.rows)
        if self.draft is None:
            return kept
        rows = min(MAX_OWN_ROWS, self.draft.window.sink_blocks * BLOCK_TOKENS)
        steps = (self._step_tables(1, rows), self._step_tables(self.draft.seats, 2))
        layout = ChunkLayout.of(self.draft.spec, BLOCK_TOKENS)
        kept += DRAFT_STREAMS * LIBRARY_BYTES + sum(state_bytes(self.draft.spec, layout, sizes) for sizes in steps)
        return kept + rows * self._draft_logits  # catching up by the kernels computes those of every row

    def prompts(self, rows: int) -> int:
        """Of a part of prompts: pieces, or attention, for which a group of history is copied together."""
        history = max(0, self.request_tokens - rows) * self.spec.kv_bytes_per_token_layer
        joined = min(history, self.group_chunks * self.layout.block_bytes)
        return max(rows * piece_bytes(self.spec), rows * prompt_attention_bytes(self.spec) + joined if rows else 0)

    def logits(self, rows: int) -> int:
        """Of so many rows."""
        return rows * self.spec.vocab_size * self.spec.dtype.itemsize

    @cached_property
    def verification(self) -> int:
        """Of a round that is interpreted: its pieces, then its logits, in float32 too where they are processed."""
        rows = self.tables.rows
        return max(rows * piece_bytes(self.spec), self.logits(rows) + rows * self.spec.vocab_size * SCORE)

    @cached_property
    def drafting(self) -> int:
        """Of a draft: its pieces while it catches up, or the logits of a step, in float32 too."""
        if self.draft is None:
            return 0
        spec, fed, seats = self.draft.spec, self.requests * FEED_TOKENS, padded_rows(self.draft.seats)
        return max(fed * piece_bytes(spec), seats * (self._draft_logits + self.spec.vocab_size * SCORE))

    @property
    def _draft_logits(self) -> int:
        """Bytes of a row's."""
        assert self.draft is not None
        return self.draft.spec.vocab_size * self.draft.spec.dtype.itemsize

    def _step_tables(self, seats: int, rows_of_seat: int) -> TableSizes:
        assert self.draft is not None
        layout, blocks = ChunkLayout.of(self.draft.spec, BLOCK_TOKENS), self.draft.window.blocks
        sizes = {"seats": seats, "rows": seats * rows_of_seat, "rows_of_seat": rows_of_seat, "blocks": blocks}
        return TableSizes.of(layout, 1, **sizes, groups=0, groups_per_seat=0)
