"""IR level 1: the model as FX graphs, whole (`ModelGraph`) and cut at its attentions (`PartitionedModel`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor, fx

from specstream.nodes import op_name


@dataclass(frozen=True)
class AttentionSpec:
    """One attention of the model, in execution order."""

    layer: int
    """Index in execution order, 0-based: also the index of its KV in the store."""
    module: str
    """Dotted name of the module that holds it, for messages."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on q @ k^T before the softmax."""


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of the system needs to know of a captured model."""

    name: str
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int | None
    """Positions the model's rotary configuration covers; None if it states no limit."""
    attentions: tuple[AttentionSpec, ...] = ()
    """Empty until `stream_attention` has run. All have the same num_kv_heads and head_dim."""
    hidden_size: int = 0
    """Values of a row between layers; 0: not known."""
    intermediate_size: int = 0
    """Values of a row where a layer is widest: in the middle of its MLP; 0: not known."""

    @property
    def num_layers(self) -> int:
        return len(self.attentions)

    @property
    def num_kv_heads(self) -> int:
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attentions[0].head_dim

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def fx_op_counts(gm: fx.GraphModule) -> Counter[str]:
    """Calls of a graph by the short name of their target."""
    calls = (node for node in gm.graph.nodes if node.op.startswith("call"))
    return Counter(str(getattr(n.target, "__name__", n.target)).removesuffix(".default") for n in calls)


@dataclass(frozen=True)
class ModelGraph:
    """A model as one FX graph over flattened tokens.

    Inputs are the placeholders `input_ids` and `position_ids`, both int64 [1, N] with N symbolic, and, once
    `select_logits` has run, `logit_rows` (int64 [R], indices into N). Parameters and buffers are `get_attr`
    nodes that alias the model's own tensors. The one output is the logits, [1, N, vocab] or [1, R, vocab].
    """

    gm: fx.GraphModule
    spec: ModelSpec

    def validate(self) -> None:
        """Raises if the FX graph is malformed."""
        self.gm.graph.lint()

    def to_text(self) -> str:
        return f"# {self.spec}\n{self.gm.graph}\n"

    def op_counts(self) -> Counter[str]:
        return fx_op_counts(self.gm)


@dataclass(frozen=True)
class Piece:
    """The part of a model between two attentions: values in, values out, by name."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    frees: tuple[str, ...]
    """Names of values nobody reads after this piece."""

    def run(self, values: dict[str, Tensor]) -> None:
        """Reads its inputs from the environment, adds its outputs, and drops what nobody reads any more."""
        outputs = self.compute([values[name] for name in self.inputs])
        for name in self.frees:
            del values[name]
        values.update(zip(self.outputs, outputs, strict=True))

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs, from the inputs; here by interpreting the module."""
        outputs: Sequence[Tensor] = self.module(*inputs)
        return outputs

    @property
    def title(self) -> str:
        """What it reads, writes and frees, for dumps."""
        return f"{self.inputs} -> {self.outputs}, frees {self.frees}"

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the parameters and buffers that a call reads whole: not of tables that rows are looked up in."""
        read = [node for node in self.module.graph.find_nodes(op="get_attr") if not _is_table(node)]
        tensors = {id(t): t for t in (attrgetter(str(node.target))(self.module) for node in read)}
        return sum(t.nbytes for t in tensors.values())


def _is_table(node: fx.Node) -> bool:
    """Whether a weight is there for nothing but embeddings."""
    return bool(node.users) and all(op_name(user) == "embedding" for user in node.users)


@dataclass(frozen=True)
class AttentionSite:
    """Where an attention stands between pieces: names of its operands and of its result."""

    spec: AttentionSpec
    query: str
    """[1, num_heads, N, head_dim]"""
    key: str
    """[1, num_kv_heads, N, head_dim]"""
    value: str
    """[1, num_kv_heads, N, head_dim]"""
    out: str
    """[1, num_heads, N, head_dim], in the model's dtype"""


class PlannablePiece(Protocol):
    """What planning needs of a piece."""

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def read_bytes(self) -> int: ...


class PlannableModel(Protocol):
    """What planning needs of a model: neither weights nor code."""

    @property
    def pieces(self) -> Sequence[PlannablePiece]: ...

    @property
    def sites(self) -> tuple[AttentionSite, ...]: ...

    @property
    def output(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def read_bytes(self) -> int: ...

    def to_text(self) -> str: ...

    def op_counts(self) -> Counter[str]: ...


@dataclass(frozen=True)
class PartitionedModel:
    """A model cut at its attentions: pieces[0], sites[0], pieces[1], ..., sites[L-1], pieces[L].

    Values live in an environment keyed by name. It starts with the graph's inputs (`input_ids`,
    `position_ids`, `logit_rows`); after the last piece it holds `output`, the logits [1, R, vocab].
    """

    pieces: tuple[Piece, ...]
    sites: tuple[AttentionSite, ...]
    inputs: tuple[str, ...]
    output: str
    spec: ModelSpec

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, those that two pieces share counted once."""
        tensors = {id(t): t for p in self.pieces for t in (*p.module.parameters(), *p.module.buffers())}
        return sum(t.nbytes for t in tensors.values())

    @property
    def read_bytes(self) -> int:
        """Bytes of them that a forward reads."""
        return sum(piece.read_bytes for piece in self.pieces)

    def validate(self) -> None:
        """Raises ValueError if a value is read that nothing wrote, or the counts do not fit together."""
        if len(self.pieces) != len(self.sites) + 1:
            raise ValueError(f"{len(self.pieces)} pieces do not fit {len(self.sites)} attentions")
        known = set(self.inputs)
        for index, piece in enumerate(self.pieces):
            piece.module.graph.lint()
            if missing := set(piece.inputs) - known:
                raise ValueError(f"piece {index} reads {sorted(missing)}, which nothing wrote")
            known = (known | set(piece.outputs)) - set(piece.frees)
            if index < len(self.sites):
                site = self.sites[index]
                if missing := {site.query, site.key, site.value} - known:
                    raise ValueError(f"attention {index} reads {sorted(missing)}, which nothing wrote")
                known = (known - {site.query, site.key, site.value}) | {site.out}
        if self.output not in known:
            raise ValueError(f"nothing wrote the output {self.output!r}")

    def to_text(self) -> str:
        parts = [f"# {self.spec}"]
        for index, piece in enumerate(self.pieces):
            parts.append(f"# piece {index}: {piece.title}")
            parts.append(str(piece.module.graph))
            if index < len(self.sites):
                parts.append(f"# attention {self.sites[index]}")
        return "\n".join(parts) + "\n"

    def op_counts(self) -> Counter[str]:
        return self._op_counts.copy()

    @cached_property
    def _op_counts(self) -> Counter[str]:
        """Counted once: every plan starts from the model."""
        total = Counter({"stream_verify": len(self.sites)})
        for piece in self.pieces:
            total += fx_op_counts(piece.module)
        return total
