"""Attention of long prompts on a CUDA device: `LayerAttention` with a library's kernels in the place of the CPU's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specstream.attention import LayerAttention, Rows
from specstream.batch import RoundBatch, SeatRows
from specstream.chunk_views import chunk_views, join_chunks
from specstream.graph import AttentionSpec
from specstream.kernels.attention import AttentionState, accumulation_dtype
from specstream.kernels.flash import flash_attention
from specstream.kernels.triton_merge_states import merge_into
from specstream.ops import token_major
from specstream.round_spec import ChunkRun


@dataclass
class PromptAttention(LayerAttention):
    """States are those of whole query heads: out [num_heads, rows, head_dim], lse [num_heads, rows].

    A state is as a library's kernel wrote it until something is merged into it; from then on it accumulates in
    float32. The rows attend to their own K and V as the model made them: those need not be gathered from chunks.
    """

    num_heads: int = 1
    own: tuple[Tensor, Tensor] | None = None
    """K and V of the layer's rows, [kv_heads, N, head_dim], from `append` to `local`."""

    def __post_init__(self) -> None:
        """Loads, plans and compiles what the first long prompt would else wait for."""
        if self.store.device.type != "cuda":
            return
        layout, ring = self.store.layout, self.store.ring
        rows = max(16, self.store.prompt_chunks * layout.chunk_tokens)
        query, key, value = (
            ring.new_zeros(rows, heads, layout.head_dim).transpose(0, 1)  # in a model's order
            for heads in (self.num_heads, layout.num_kv_heads, layout.num_kv_heads)
        )
        self.states[0] = flash_attention(query, key, value, 1.0, causal=True)
        for _ in range(2):  # into the library's state, then into one that accumulates
            self._merge(0, query, *join_chunks([ring[0]]), 1.0)
        self.states.clear()

    def inputs(self, batch: RoundBatch) -> dict[str, Tensor]:
        """The batch's own, copied without waiting for the round before."""
        device = self.store.device
        if device.type != "cuda":
            return super().inputs(batch)
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.inputs.items()}

    def append(self, layer: int, key: Tensor, value: Tensor, seats: Rows) -> None:
        """Writes the rows' K and V, [1, kv_heads, N, head_dim], into their chunks, and keeps them for `local`."""
        super().append(layer, key, value, seats)
        self.own = key[0], value[0]

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None:
        """Starts each seat's state with its own rows, causally, and merges the other tokens on the device."""
        assert self.own is not None
        (key, value), self.own = self.own, None
        tokens = self.store.layout.chunk_tokens
        for seat, (spec, rows) in seats.items():
            own, kv = slice(rows.start, rows.stop), rows.kv
            ours = query[0, :, own]
            self.states[seat] = flash_attention(ours, key[:, own], value[:, own], attention.scale, causal=True)
            chunks = -(-kv.length // tokens)
            past = [*range(min(spec.resident, chunks)), *range(spec.on_host.stop, chunks)]
            if past:
                count = kv.length - spec.streamed * tokens
                keys, values = join_chunks(chunk_views(self.store, layer, spec, kv, past))
                self._merge(seat, ours, keys[:, :count], values[:, :count], attention.scale)

    def attend(
        self, slot: int, group: int, run: ChunkRun, query: Tensor, attention: AttentionSpec, rows: SeatRows
    ) -> None:
        """Attends to the chunks of a run, which are in a ring slot, and merges."""
        kv = self.store.ring[slot, : run.count]
        self._merge(run.seat, query[0, :, rows.start : rows.stop], *join_chunks([kv]), attention.scale)
        if self.store.debug:
            kv.fill_(float("nan"))

    def merge(self, query: Tensor, attention: AttentionSpec, seats: Rows) -> Tensor:
        """The attention's output, [1, num_heads, N, head_dim] in the query's dtype; zeros for padding."""
        out = token_major(query).zero_()
        for seat, (_, rows) in seats.items():
            out[0, :, rows.start : rows.stop] = self.states.pop(seat).out
        return out

    def forget(self) -> None:
        super().forget()
        self.own = None

    def _merge(self, seat: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Attends to keys that all rows of the seat see, and merges into its state."""
        part = flash_attention(query, key, value, scale, causal=False)
        state, dtype = self.states[seat], accumulation_dtype(query.dtype)
        if state.out.dtype is dtype:
            merged = state
        else:  # the library's own
            merged = AttentionState(torch.empty_like(state.out, dtype=dtype), torch.empty_like(state.lse, dtype=dtype))
        merge_into(merged, state, part)
        self.states[seat] = merged
