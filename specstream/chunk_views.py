"""Where chunks are on the device in a round: in a request's own blocks, or in the prompt buffer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from specstream.kv import DeviceStore, SequenceKV
from specstream.round_spec import PROMPT_SLOTS, ChunkRun, SeatSpec


def own_block(store: DeviceStore, layer: int, seat: SeatSpec, kv: SequenceKV, chunk: int) -> Tensor:
    """The request's block of a chunk, [2, kv_heads, tokens, head_dim]."""
    return store.blocks[layer, kv.blocks[seat.device_slot(chunk)]]


def chunk_views(store: DeviceStore, layer: int, seat: SeatSpec, kv: SequenceKV, chunks: Iterable[int]) -> list[Tensor]:
    """The chunks in their order, as views [n, 2, kv_heads, tokens, head_dim] of as many as are neighbours in memory."""
    blocks, prompt = store.blocks[layer], store.prompt[layer % PROMPT_SLOTS]
    runs: list[tuple[Tensor, int, int]] = []
    for chunk in chunks:
        if seat.buffer_start is not None and chunk >= seat.buffered.start:
            memory, place = prompt, seat.buffer_start + chunk - seat.buffered.start
        else:
            memory, place = blocks, kv.blocks[seat.device_slot(chunk)]
        if runs and runs[-1][0] is memory and runs[-1][2] == place:
            runs[-1] = memory, runs[-1][1], place + 1
        else:
            runs.append((memory, place, place + 1))
    return [memory[start:stop] for memory, start, stop in runs]


def write_rows(views: list[Tensor], offset: int, key: Tensor, value: Tensor) -> None:
    """Writes rows of K and V, [kv_heads, rows, head_dim], into chunks, from token `offset` of the first one on.

    Whole chunks that are neighbours are written at once.
    """
    row, rows = 0, key.shape[1]
    for view in views:
        tokens, chunk = view.shape[3], 0
        while chunk < len(view) and row < rows:
            whole = 0 if offset else min(len(view) - chunk, (rows - row) // tokens)
            count = whole * tokens or min(tokens - offset, rows - row)
            for side, given in enumerate((key[:, row : row + count], value[:, row : row + count])):
                if whole:
                    view[chunk : chunk + whole, side] = given.view(-1, whole, tokens, given.shape[2]).transpose(0, 1)
                else:
                    view[chunk, side, :, offset : offset + count] = given
            row, chunk, offset = row + count, chunk + max(1, whole), 0


def join_chunks(views: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values of chunks, [kv_heads, keys, head_dim]."""
    chunks = sum(map(len, views))
    _, sides, heads, tokens, dim = views[0].shape
    joined = views[0].new_empty(sides, heads, chunks, tokens, dim)
    start = 0
    for view in views:
        joined[:, :, start : start + len(view)] = view.permute(1, 2, 0, 3, 4)
        start += len(view)
    key, value = joined.flatten(2, 3)
    return key, value


def offload_copies(
    store: DeviceStore, layer: int, seat: SeatSpec, kv: SequenceKV, run: ChunkRun
) -> list[tuple[Tensor, Tensor]]:
    """The copies (to the host, from the device) that write chunks out: one, if they are in the prompt buffer."""
    copies, start = [], run.start
    for source in chunk_views(store, layer, seat, kv, run):
        copies.append((kv.host_view(layer, start, start + len(source)), source))
        start += len(source)
    return copies
