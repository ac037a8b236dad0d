"""From a model to its pieces: capture, the passes on the model graph, the probe."""

from __future__ import annotations

from torch import nn

from specstream.capture import capture, forward_of
from specstream.graph import PartitionedModel
from specstream.passes.canonicalize import Canonicalize
from specstream.passes.compile_pieces import CompilePieces
from specstream.passes.fuse_swiglu import FuseSwiglu
from specstream.passes.group_linears import GroupLinears
from specstream.passes.partition import Partition
from specstream.passes.select_logits import SelectLogits
from specstream.passes.stream_attention import StreamAttention
from specstream.pipeline import Pass, PassRunner
from specstream.probe import probe


def model_passes(max_model_len: int | None) -> tuple[Pass, ...]:
    """The passes on the model graph, in order."""
    return (
        Canonicalize(max_model_len),  # first: the others know one form of attention only
        StreamAttention(),  # needs the canonical form; from here on the spec lists the attentions
        SelectLogits(),  # before the cut, while head and output are in one graph
        Partition(),  # last: it turns the graph into pieces
    )


def lowering_passes(max_rows: int) -> tuple[Pass, ...]:
    """The passes on the pieces of a model on a CUDA device, in order."""
    return (
        FuseSwiglu(),  # first: it knows plain linear maps
        GroupLinears(),  # before compiling: to the compiler a call of `linears` is opaque
        CompilePieces(max_rows=max_rows),
    )


def compile_model(model: nn.Module, name: str, max_model_len: int | None, role: str = "model") -> PartitionedModel:
    """Captures a model, cuts it at its attentions and proves the result against the model's own forward.

    Args:
        role: "target" or "draft": two models of one name are dumped to two folders.

    Raises:
        UnsupportedModel: if the model cannot be represented exactly.
    """
    captured = capture(model, name=name, max_model_len=max_model_len)
    partitioned: PartitionedModel = PassRunner(f"{role}_{name}").run(model_passes(max_model_len), captured)
    probe(forward_of(model), partitioned, max_model_len=max_model_len)
    return partitioned


def lower_model(
    model: nn.Module,
    partitioned: PartitionedModel,
    max_model_len: int | None,
    role: str = "model",
    max_rows: int = CompilePieces.max_rows,
) -> PartitionedModel:
    """Has Inductor compile the pieces of a model, for CUDA devices, and proves the result as `compile_model` does.

    Args:
        model, max_model_len, role: as they were given to `compile_model`.
        partitioned: what it returned.
        max_rows: the most rows that one call may have.

    Raises:
        UnsupportedModel: if the compiled pieces compute something else.
    """
    runner = PassRunner(f"{role}_{partitioned.spec.name}_lowered")
    lowered: PartitionedModel = runner.run(lowering_passes(max_rows), partitioned)
    probe(forward_of(model), lowered, max_model_len=max_model_len)
    return lowered
