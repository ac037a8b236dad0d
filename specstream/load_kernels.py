"""Kernels are compiled and loaded when an engine is made, so that neither first rounds nor joins and leaves wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specstream.attention_choice import KernelChoice
from specstream.batch import MIN_ROWS
from specstream.graph import AttentionSite, PartitionedModel
from specstream.kernel_attention import KernelAttention
from specstream.kernels.tiling import MAX_OWN_ROWS
from specstream.probe import run_pieces
from specstream.round_spec import ChunkRun

_NO_CHUNKS = ChunkRun(0, 0, 0)
_NO_ROWS: Any = None


ROWS_OF_A_PROMPT = (MIN_ROWS, 16, 32, 64, MAX_OWN_ROWS)
"""Any number of rows is computed by the same kernels as one of these; a long prompt has those of a library."""


@torch.no_grad()
def load_kernels(model: PartitionedModel, choice: KernelChoice, sizes: Iterable[tuple[int, int]]) -> None:
    """Computes rounds without requests on the current stream: they attend to nothing and write nothing to the store.

    Args:
        sizes: of each round, for how many seats it has room, and for how many rows of each.
    """
    for seats, rows in sizes if choice.has_kernels else ():
        _load(model, choice.without_rows(seats, rows))


def _load(model: PartitionedModel, attention: KernelAttention) -> None:
    def attend(site: AttentionSite, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention.append(site.spec.layer, key, value, {})
        attention.local(site.spec.layer, query, site.spec, {})
        attention.attend(0, 0, _NO_CHUNKS, query, site.spec, _NO_ROWS)
        return attention.merge(query, site.spec, {})

    run_pieces(model, tuple(attention.tables.inputs.values()), attend)


def seat_counts(most: int) -> list[int]:
    """The powers of two below `most`, and `most`: each kernel that a number of seats has is that of one of these."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
