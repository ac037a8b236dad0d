"""Attention of long prompts on a CUDA device: `LayerAttention` with the flash kernel in the place of the CPU's."""

from __future__ import annotations

from torch import Tensor

from specstream.attention import LayerAttention, Rows
from specstream.batch import SeatRows
from specstream.graph import AttentionSpec
from specstream.kernels.attention import merge_states
from specstream.kernels.flash import flash_attention
from specstream.ops import token_major
from specstream.round_spec import ChunkRun


class PromptAttention(LayerAttention):
    """States are those of whole query heads: out [num_heads, rows, head_dim], lse [num_heads, rows]."""

    def local(self, layer: int, query: Tensor, attention: AttentionSpec, seats: Rows) -> None:
        """Starts each seat's state with what is on the device: whole chunks, then causally the open ones."""
        tokens = self.store.layout.chunk_tokens
        blocks = self.store.blocks[layer]
        for seat, (spec, rows) in seats.items():
            own = query[0, :, rows.start : rows.stop]
            open_chunk, end = rows.kv.length // tokens, rows.kv.length + rows.count
            past = [*range(min(spec.resident, open_chunk)), *range(spec.on_host.stop, open_chunk)]
            fresh = range(open_chunk, -(-end // tokens))
            listed = [rows.kv.blocks[spec.device_slot(chunk)] for chunk in [*past, *fresh]]
            key, value = _join(blocks[listed])
            last = (len(past) - open_chunk) * tokens + end
            self.states[seat] = flash_attention(own, key[:, :last], value[:, :last], attention.scale, causal=True)

    def attend(
        self, slot: int, group: int, run: ChunkRun, query: Tensor, attention: AttentionSpec, rows: SeatRows
    ) -> None:
        """Attends to the chunks of a run, which are in a ring slot, and merges."""
        own, kv = query[0, :, rows.start : rows.stop], self.store.ring[slot, : run.count]
        part = flash_attention(own, *_join(kv), attention.scale, causal=False)
        self.states[run.seat] = merge_states(self.states[run.seat], part)
        if self.store.debug:
            kv.fill_(float("nan"))

    def merge(self, query: Tensor, attention: AttentionSpec, seats: Rows) -> Tensor:
        """The attention's output, [1, num_heads, N, head_dim] in the query's dtype; zeros for padding."""
        out = token_major(query).zero_()
        for seat, (_, rows) in seats.items():
            out[0, :, rows.start : rows.stop] = self.states.pop(seat).out
        return out


def _join(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, keys, head_dim] of blocks [chunks, 2, kv_heads, tokens, head_dim]."""
    chunks, _, heads, tokens, dim = kv.shape
    key, value = kv.permute(1, 2, 0, 3, 4).reshape(2, heads, chunks * tokens, dim)
    return key, value
