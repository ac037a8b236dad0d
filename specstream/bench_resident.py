"""What streaming is compared with: the pieces of a captured model over KV that is all on the device, without an engine.

Attention is torch's own, its flash kernel on a CUDA device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from specstream.graph import AttentionSite, PartitionedModel
from specstream.ops import token_major
from specstream.probe import run_pieces

REPLAYS = 30


class ResidentModel:
    """One text of at most `tokens` tokens, whose keys and values stay where they are."""

    def __init__(self, model: PartitionedModel, tokens: int) -> None:
        self.model, self.start = model, 0
        spec = model.spec
        shape = (spec.num_layers, 2, 1, spec.num_kv_heads, tokens, spec.head_dim)
        self._kv = torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def run(self, ids: Tensor, start: int, logit_rows: Tensor) -> Tensor:
        """Computes tokens after the first `start` ones; returns logits [1, R, vocab].

        Args:
            ids: int64 [1, N], N at least 2, on the device.
            logit_rows: int64 [R], the rows of `ids` whose logits are wanted, on the device.
        """
        self.start = start
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return run_pieces(self.model, (ids, positions, logit_rows), self._attend)

    def _attend(self, site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k and v, [1, kv_heads, N, head_dim]; attends causally from the N last rows, q."""
        rows, stop = q.shape[2], self.start + q.shape[2]
        keys, values = self._kv[site.spec.layer, :, :, :, :stop]
        keys[:, :, self.start :] = k
        values[:, :, self.start :] = v
        causal = causal_lower_right(rows, stop)
        out = F.scaled_dot_product_attention(q, keys, values, causal, scale=site.spec.scale, enable_gqa=True)
        # As compiled pieces are promised; flash attention's is already.
        return out if out.transpose(1, 2).is_contiguous() else token_major(q).copy_(out)


def in_one_graph(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A call that replays a CUDA graph of `call`, which has run before; on a CPU `call` itself."""
    if device.type == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call until the device is done, in milliseconds."""
    times: list[float] = []
    for _ in range(REPLAYS):
        start = time.perf_counter()
        call()
        wait_for(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
