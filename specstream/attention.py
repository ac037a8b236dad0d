"""The four attention tasks of a layer, over the KV store: append, local part, one streamed group, merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specstream.batch import RoundBatch, SeatRows
from specstream.chunk_views import chunk_views, join_chunks, own_block, write_rows
from specstream.graph import AttentionSpec
from specstream.kernels.attention import (
    AttentionState,
    merge_states,
    pack_query,
    partial_attention,
    unpack_output,
)
from specstream.kernels.flash import flash_attention
from specstream.kv import DeviceStore
from specstream.ops import token_major
from specstream.round_spec import ChunkRun, SeatSpec

Rows = dict[int, tuple[SeatSpec, SeatRows]]
"""By seat: the structure of a request's part in the round, and its rows."""


class Attention(Protocol):
    """The attention of a round, one layer after the other; `seats` say whose rows are where."""

    def inputs(self, batch: RoundBatch) -> dict[str, Tensor]:
        """The model's inputs for the round, on its device: the batch's own, maybe with padding and more logits."""

    def append(self, layer: int, key: Tensor, value: Tensor, seats: Rows) -> None: ...

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None: ...

    def attend(
        self, slot: int, group: int, run: ChunkRun, query: Tensor, attention: AttentionSpec, rows: SeatRows
    ) -> None: ...

    def merge(self, query: Tensor, attention: AttentionSpec, seats: Rows) -> Tensor: ...

    def forget(self) -> None:
        """Drops what a failed round has left."""


@dataclass
class LayerAttention:
    """Attention of one layer at a time; `states` holds, for each seat, what has been attended to so far."""

    store: DeviceStore
    states: dict[int, AttentionState] = field(default_factory=dict)

    def inputs(self, batch: RoundBatch) -> dict[str, Tensor]:
        return {name: tensor.to(self.store.device) for name, tensor in batch.inputs.items()}

    def append(self, layer: int, key: Tensor, value: Tensor, seats: Rows) -> None:
        """Writes the rows' K and V, [1, kv_heads, N, head_dim], into their device chunks."""
        tokens = self.store.layout.chunk_tokens
        for spec, rows in seats.values():
            kv, written = rows.kv, slice(rows.start, rows.stop)
            open_chunk, offset = kv.length // tokens, kv.length % tokens
            buffered = chunk_views(self.store, layer, spec, kv, spec.buffered)
            if buffered and self.store.debug:
                buffered[0].fill_(float("nan"))
            if buffered and offset and open_chunk == spec.buffered.start:
                buffered[0][0] = own_block(self.store, layer, spec, kv, open_chunk)
            touched = range(open_chunk, -(-(kv.length + rows.count) // tokens))
            views = chunk_views(self.store, layer, spec, kv, touched)
            write_rows(views, offset, key[0, :, written], value[0, :, written])
            for chunk in spec.kept:
                kept = buffered[0][chunk - spec.buffered.start]
                own_block(self.store, layer, spec, kv, chunk).copy_(kept)

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None:
        """Starts each seat's state with what is on the device: whole chunks, then causally the open ones."""
        tokens = self.store.layout.chunk_tokens
        for seat, (spec, rows) in seats.items():
            own = query[0, :, rows.start : rows.stop]
            open_chunk = rows.kv.length // tokens
            end = rows.kv.length + rows.count
            fresh = chunk_views(self.store, layer, spec, rows.kv, range(open_chunk, -(-end // tokens)))
            key, value = (kv[:, : end - open_chunk * tokens] for kv in join_chunks(fresh))
            state = flash_attention(own, key, value, attention.scale, causal=True)
            packed = pack_query(own, attention.num_kv_heads)
            state = AttentionState(state.out.reshape(packed.shape), state.lse.reshape(packed.shape[:2]))
            past = [*range(min(spec.resident, open_chunk)), *range(spec.on_host.stop, open_chunk)]
            if past:
                views = chunk_views(self.store, layer, spec, rows.kv, past)
                kv = views[0] if len(views) == 1 else torch.cat(views)
                state = merge_states(state, partial_attention(packed, kv[:, 0], kv[:, 1], attention.scale))
            self.states[seat] = state

    def attend(
        self, slot: int, group: int, run: ChunkRun, query: Tensor, attention: AttentionSpec, rows: SeatRows
    ) -> None:
        """Attends to the chunks of a run, all committed before this round, which are in a ring slot, and merges."""
        packed = pack_query(query[0, :, rows.start : rows.stop], attention.num_kv_heads)
        kv = self.store.ring[slot, : run.count]
        part = partial_attention(packed, kv[:, 0], kv[:, 1], attention.scale)
        self.states[run.seat] = merge_states(self.states[run.seat], part)
        if self.store.debug:
            kv.fill_(float("nan"))

    def merge(self, query: Tensor, attention: AttentionSpec, seats: Rows) -> Tensor:
        """The attention's output, [1, num_heads, N, head_dim] in the query's dtype; zeros for padding."""
        out = token_major(query).zero_()
        for seat, (_, rows) in seats.items():
            state = self.states.pop(seat)
            out[0, :, rows.start : rows.stop] = unpack_output(state.out, attention.num_heads)
        return out

    def forget(self) -> None:
        self.states.clear()
