"""A model's shapes without capturing it: what each piece reads and each attention is, from one run on the meta device.

That is all that planning needs. A capture would prove that the model can be served, and takes its weights and minutes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specstream.errors import UnsupportedModel
from specstream.graph import AttentionSite, AttentionSpec, ModelSpec
from specstream.models.normalize import attention_implementation
from specstream.models.rope import max_positions, plain_rope, transformers_parts
from specstream.models.trial import refused_arguments
from specstream.widths import widths_of

_IMPLEMENTATION = "specstream_shapes"
_TOKENS = 3


@dataclass(frozen=True)
class PieceShape:
    """The part of a model between two attentions."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    read_bytes: int
    """Of weights: not of tables that rows are looked up in."""


@dataclass(frozen=True)
class ModelShapes:
    """What `PartitionedModel` says of a model but for its code."""

    pieces: tuple[PieceShape, ...]
    sites: tuple[AttentionSite, ...]
    spec: ModelSpec
    weight_bytes: int
    output: str = "logits"

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a forward reads."""
        return sum(piece.read_bytes for piece in self.pieces)

    def to_text(self) -> str:
        return "\n".join([f"# {self.spec}", *map(str, self.pieces)]) + "\n"

    def op_counts(self) -> Counter[str]:
        return Counter({"stream_verify": len(self.sites)})


def shapes_of(model: nn.Module, name: str, device: torch.device, max_model_len: int) -> ModelShapes:
    """The shapes of a transformers model that is on the meta device.

    Args:
        device: where it is meant to run.
        max_model_len: tokens that it is planned for.

    Raises:
        UnsupportedModel: its forward needs values, or does not attend through transformers' AttentionInterface, or
            attends in a way that is not supported.
    """
    parts = transformers_parts(model)
    names = {id(module): path for path, module in model.named_modules()}
    record = _Record(names, dict(_tensors(model)), max_model_len)
    positions = torch.arange(_TOKENS, device="meta")[None]
    untyped: Any = model
    try:
        plain_attention = attention_implementation(parts, _IMPLEMENTATION, record.attention)
        with plain_rope(model, max_model_len), plain_attention, torch.no_grad(), _Reads(record):
            logits = untyped(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False).logits
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = f"its shapes cannot be told without its values ({type(error).__name__}: {str(error).splitlines()[0]})"
        raise UnsupportedModel("", reason, "Load it and let specstream.compile plan it.") from error
    if not record.attentions:
        reason = f"{type(model).__name__} does not attend through transformers' AttentionInterface"
        raise UnsupportedModel("", reason, "Use the model's implementation in transformers.")
    spec = ModelSpec(
        name,
        logits.shape[-1],
        record.dtype,
        device,
        max_positions(model),
        attentions=tuple(record.attentions),
        **widths_of(model),
    )
    for attention in spec.attentions:
        if (attention.num_kv_heads, attention.head_dim) != (spec.num_kv_heads, spec.head_dim):
            reason = f"its KV has {attention.num_kv_heads} heads of {attention.head_dim}, the first {spec.num_kv_heads}"
            raise UnsupportedModel(attention.module, reason, "Use a model whose attentions all have KV of one shape.")
    sites = tuple(_site(attention) for attention in spec.attentions)
    pieces = tuple(_piece(index, sites, read) for index, read in enumerate(record.read))
    return ModelShapes(pieces, sites, spec, sum(record.tensors[key].nbytes for key in record.used))


def _tensors(model: nn.Module) -> Iterable[tuple[int, Tensor]]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield id(tensor), tensor


def _site(attention: AttentionSpec) -> AttentionSite:
    query, key, value, out = (f"{name}{attention.layer}" for name in ("q", "k", "v", "attended"))
    return AttentionSite(attention, query, key, value, out)


def _piece(index: int, sites: tuple[AttentionSite, ...], read_bytes: int) -> PieceShape:
    """Between the attention before it and the one after it."""
    before, after = sites[max(0, index - 1)], sites[min(index, len(sites) - 1)]
    inputs = (before.out, f"residual{index - 1}") if index else ("input_ids", "position_ids")
    last = index == len(sites)
    outputs = ("logits",) if last else (after.query, after.key, after.value, f"residual{index}")
    return PieceShape(inputs, outputs, read_bytes)


@dataclass
class _Record:
    """What was seen of a run."""

    names: Mapping[int, str]
    tensors: Mapping[int, Tensor]
    """Parameters and buffers, by id."""
    limit: int
    """Tokens that the model is planned for."""
    attentions: list[AttentionSpec] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    """Of keys and values."""
    read: list[int] = field(default_factory=lambda: [0])
    """Bytes, by piece."""
    used: set[int] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    """What the piece that runs has read."""

    def note(self, tensor: Tensor, *, looked_up: bool) -> None:
        """An operation takes a tensor, to look up rows of it or whole."""
        key = id(tensor)
        if key not in self.tensors:
            return
        self.used.add(key)
        if not looked_up and key not in self._seen:
            self._seen.add(key)
            self.read[-1] += tensor.nbytes

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """In the place of a model's attention: q [1, Hq, N, D], k and v [1, Hkv, N, D] -> [1, N, Hq, D].

        Raises:
            UnsupportedModel: its arguments say that it is none that an engine takes.
        """
        reason, way_out = refused_arguments(module, self.limit, dropout, arguments)
        if reason:
            raise UnsupportedModel(self.names.get(id(module), ""), reason, way_out)
        scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        place = AttentionSpec(len(self.attentions), self.names.get(id(module), ""), heads, kv_heads, dim, scale)
        self.attentions.append(place)
        self.dtype = key.dtype
        self.read.append(0)
        self._seen.clear()
        return query.new_empty(1, query.shape[2], heads, value.shape[3]), None


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which weights each operation takes."""

    def __init__(self, record: _Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for argument in args:
            if isinstance(argument, Tensor):
                self._record.note(argument, looked_up=func is torch.ops.aten.embedding.default)
        return func(*args, **(kwargs or {}))
