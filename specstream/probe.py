"""The probe: does the cut model, fed in segments with its KV kept, compute what the model computes at once?

It refuses models that need more than their attention to know the past: token shift, convolutions, positions
from arange, pooling, router state, masks that were more than causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specstream.errors import UnsupportedModel
from specstream.graph import AttentionSite, PartitionedModel
from specstream.ops import token_major

Attend = Callable[[AttentionSite, Tensor, Tensor, Tensor], Tensor]

_TOKENS = 23
"""Cut into segments of 11, 7 and 5."""
_LONG_TEXT = 640
"""A second text, cut at 320 and 512: what reaches further back than this goes unnoticed."""
_STRANGERS = 3
"""Rows of another request in each call: no row of a flattened batch may matter to another's."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest accepted |difference| / |row| of a row of logits. float64 allows for norms computed in float32."""
_OUTLIERS = {torch.float16: 0.01, torch.bfloat16: 0.01}
"""Share of the rows that may differ by more: where two keys' scores tie, rounding decides which one a head looks up."""
_NEAR_CUT = 8
"""Rows from a cut on of which none may: what is cut off from its past differs there."""


def run_pieces(partitioned: PartitionedModel, inputs: Sequence[Tensor], attend: Attend) -> Tensor:
    """Runs the pieces in order with `attend` between them.

    Args:
        partitioned: the model.
        inputs: input_ids [1, N], position_ids [1, N], logit_rows [R].
        attend: takes a site and its q, k, v and returns [1, Hq, N, D].

    Returns:
        Logits [1, R, vocab].
    """
    values = dict(zip(partitioned.inputs, inputs, strict=True))
    for index, piece in enumerate(partitioned.pieces):
        piece.run(values)
        if index < len(partitioned.sites):
            site = partitioned.sites[index]
            operands = (values.pop(name) for name in (site.query, site.key, site.value))
            values[site.out] = attend(site, *operands)
    return values[partitioned.output]


@dataclass
class _Reference:
    """The plainest attention with history: `own` rows see what was kept and are kept, others see themselves."""

    own: int
    kept: dict[int, tuple[Tensor, Tensor]]

    def __call__(self, site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = slice(None, self.own)
        layer = site.spec.layer
        keys, values = k[:, :, own], v[:, :, own]
        if layer in self.kept:
            past_keys, past_values = self.kept[layer]
            keys, values = torch.cat((past_keys, keys), 2), torch.cat((past_values, values), 2)
        self.kept[layer] = keys, values
        rest = slice(self.own, None)
        parts = (q[:, :, own], keys, values), (q[:, :, rest], k[:, :, rest], v[:, :, rest])
        return token_major(q).copy_(torch.cat([_attend(*part, site.spec.scale) for part in parts], 2))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [1, Hq, T, D] are the last T of the rows of k, v [1, Hkv, S, D]."""
    group = q.shape[1] // k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = q.to(wide) @ k.transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def probe(
    forward: Callable[[Tensor, Tensor], Tensor],
    partitioned: PartitionedModel,
    *,
    max_model_len: int | None,
) -> None:
    """Compares `forward` on random tokens with the pieces run over three segments of them.

    Args:
        forward: the model itself, untouched: (input_ids, position_ids), [1, N] -> logits [1, N, vocab].
        partitioned: what became of it.
        max_model_len: positions that may be used, if fewer than the probe's own.

    Raises:
        UnsupportedModel: if a row of logits differs by more than rounding, with the row and the difference.
    """
    spec = partitioned.spec
    limit = min(max_model_len or _LONG_TEXT, spec.max_positions or _LONG_TEXT)
    for total in sorted({min(_TOKENS, limit), min(_LONG_TEXT, limit)}):
        _probe_text(forward, partitioned, total)


def _probe_text(forward: Callable[[Tensor, Tensor], Tensor], partitioned: PartitionedModel, total: int) -> None:
    """Compares over one random text of `total` tokens."""
    spec = partitioned.spec
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(spec.vocab_size, (1, total), generator=generator).to(spec.device)
    strange = torch.randint(spec.vocab_size, (1, _STRANGERS), generator=generator).to(spec.device)
    positions = torch.arange(total, device=spec.device)[None]
    reference = _Reference(0, {})
    rows = []
    with torch.no_grad():
        try:
            expected = forward(ids, positions)[0]
        except (IndexError, RuntimeError) as error:
            reason = f"it does not run on {total} tokens ({type(error).__name__}: {str(error).splitlines()[0]})"
            raise UnsupportedModel("", reason, "Set max_model_len to the positions it has.") from error
        for part in _cuts(total):
            reference.own = part.stop - part.start
            inputs = (
                torch.cat((ids[:, part], strange), 1),
                torch.cat((positions[:, part], positions[:, :_STRANGERS]), 1),
                torch.arange(reference.own, device=spec.device),
            )
            rows.append(run_pieces(partitioned, inputs, reference)[0])
    _compare(torch.cat(rows), expected, total)


def _cuts(total: int) -> list[slice]:
    first, second = max(total // 2, 1), max(total * 4 // 5, 2)
    return [slice(0, first), slice(first, second), slice(second, total)]


def _compare(got: Tensor, expected: Tensor, total: int) -> None:
    tolerance = _TOLERANCE[expected.dtype]
    wide_got, wide = got.double(), expected.double()
    if not wide.isfinite().all():
        raise UnsupportedModel(
            "",
            f"its own logits are not finite in {expected.dtype}",
            "Look for NaN in its weights, or load it in a dtype of wider range (bfloat16, float32).",
        )
    apart = (wide_got - wide).norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-12)
    apart = apart.nan_to_num(float("inf"))
    starts = [part.start for part in _cuts(total)]
    beyond = apart > tolerance
    near_cut = any(bool(beyond[start : start + _NEAR_CUT].any()) for start in starts[1:])
    if not near_cut and int(beyond.sum()) <= _OUTLIERS.get(expected.dtype, 0.0) * total:
        return
    worst = int(apart.argmax())
    segment = sum(worst >= start for start in starts)
    largest = (wide_got - wide)[worst].abs().max()
    raise UnsupportedModel(
        "",
        f"run in segments (cut at tokens {starts[1]} and {starts[2]}) with its KV kept it computes other logits "
        f"than at once: by {float(apart[worst]):.1e} of their size at token {worst}, in segment {segment} "
        f"(largest difference {float(largest):.2e}; {tolerance:.0e} is allowed)",
        "It knows the past by more than its attention (token shift, convolution, recurrence, positions from "
        "arange, pooling), which SpecStream cannot stream.",
    )
