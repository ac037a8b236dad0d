"""Pass `compile_pieces`: Inductor compiles each kind of piece once, and all pieces of the kind call the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import standalone_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from specstream.batch import MIN_ROWS
from specstream.graph import PartitionedModel, Piece
from specstream.nodes import example
from specstream.structure import Structure, structure_of, with_weight_inputs

Size = int | torch.SymInt
Compiled = Callable[..., Sequence[Tensor]]

TYPICAL_ROWS = 40
"""Rows that Inductor chooses kernels for where their number is open."""
SETTINGS: dict[str, Any] = {
    "deterministic": True,  # of reductions of a few rows, which take two microseconds, timing would choose by noise
    "triton.cudagraphs": False,  # the executor captures all pieces in one graph
    "size_asserts": True,  # inputs of other strides are an error, not wrong numbers
}


@dataclass(frozen=True)
class CompiledPiece(Piece):
    """A piece that calls compiled code. Its module says what is computed, and is what text and counts come from."""

    function: Compiled
    """(inputs, weights) -> outputs; shared by all pieces of the kind."""
    weights: tuple[Tensor, ...]
    kind: int
    """Number of the structural class, in order of appearance."""

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.function(*inputs, *self.weights)

    @property
    def title(self) -> str:
        return f"{super().title}, compiled as kind {self.kind}"


@dataclass(frozen=True)
class CompilePieces:
    """PartitionedModel -> PartitionedModel of CompiledPieces.

    Pieces whose graphs differ in nothing but names and weights are of one kind: one compilation, with weights as
    inputs. The code has no guards, makes no streams or events, and can be captured in a CUDA graph once it has run
    on that device. Attention outputs must be `token_major`, as `stream_verify`'s are. Inductor fuses, so that half
    precision is rounded less often than in the interpreted piece: results are as exact, but not the same bits.
    """

    rows: int | None = None
    """Rows N of every call; None: any number from two up to max_rows."""
    logit_rows: int | None = None
    """Rows R of logits of every call; None: any number up to max_rows."""
    max_rows: int = 8192
    """The most rows that code for any number of them is right for."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings of Inductor, such as ("max_autotune_gemm", True)."""
    name: str = "compile_pieces"

    def run(self, ir: PartitionedModel) -> PartitionedModel:
        kinds: dict[Hashable, Compiled] = {}
        pieces = []
        for piece in ir.pieces:
            structure = structure_of(piece)
            if structure.key not in kinds:
                kinds[structure.key] = self._compiled(piece, structure, _row_symbols(ir))
            plain = {field.name: getattr(piece, field.name) for field in dataclasses.fields(Piece)}
            kind = list(kinds).index(structure.key)
            pieces.append(CompiledPiece(**plain, function=kinds[structure.key], weights=structure.weights, kind=kind))
        return dataclasses.replace(ir, pieces=tuple(pieces))

    def check(self, ir: PartitionedModel) -> None:
        functions: dict[Hashable, Compiled] = {}
        for index, piece in enumerate(ir.pieces):
            if not isinstance(piece, CompiledPiece):
                raise ValueError(f"piece {index} is not compiled")
            structure = structure_of(piece)
            if functions.setdefault(structure.key, piece.function) is not piece.function:
                raise ValueError(f"piece {index} does not share the code of its kind")
            if [t.data_ptr() for t in structure.weights] != [t.data_ptr() for t in piece.weights]:
                raise ValueError(f"piece {index} does not have its own weights")
        if len(set(map(id, functions.values()))) != len(functions):
            raise ValueError("pieces of different kinds share code")

    def _compiled(self, piece: Piece, structure: Structure, symbols: tuple[Any, Any]) -> Compiled:
        shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=shape_env)
        rows = self.rows or _open_size(mode, "rows", self.max_rows)
        logit_rows = self.logit_rows or _open_size(mode, "logit_rows", self.max_rows)
        sizes = dict(zip(symbols, (rows, logit_rows), strict=True))
        examples: list[Any] = [
            _fake(example(node), mode, sizes) for node in piece.module.graph.find_nodes(op="placeholder")
        ]
        examples += [_fake(weight, mode, sizes) for weight in structure.weights]
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch._inductor.config.patch(SETTINGS | dict(self.settings)),
            tracing(TracingContext(mode)),
        ):
            function = standalone_compile(
                with_weight_inputs(piece, structure), examples, dynamic_shapes="from_tracing_context"
            )
        _check_general(shape_env, self.max_rows)
        return cast(Compiled, function)


def _row_symbols(ir: PartitionedModel) -> tuple[Any, Any]:
    """The symbols of N and R in the example values of the pieces."""
    nodes = [node for piece in ir.pieces for node in piece.module.graph.find_nodes(op="placeholder")]
    inputs = {node.target: example(node) for node in nodes}
    ids, _, logit_rows = ir.inputs
    return inputs[ids].shape[1].node.expr, inputs[logit_rows].shape[0].node.expr


def _open_size(mode: FakeTensorMode, name: str, most: int) -> Size:
    """A size that may be any number from two to `most`; compiled code takes it from the inputs' shapes."""
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    with torch.inference_mode(False):
        typical = torch.empty(min(TYPICAL_ROWS, most))
        tensor = mode.from_tensor(typical, source=ConstantSource(name), symbolic_context=context)
    size = tensor.shape[0]
    torch._check(size <= most)  # type: ignore[no-untyped-call]
    return size


def _fake(tensor: Tensor, mode: FakeTensorMode, sizes: dict[Any, Size]) -> Tensor:
    """A fake tensor like `tensor`, its numbers of rows replaced."""

    def replaced(size: Size) -> Size:
        if isinstance(size, int):
            return size
        return cast(Size, sympy_interp(PythonReferenceAnalysis, sizes, size.node.expr))

    shape, stride = (tuple(map(replaced, given)) for given in (tensor.shape, tensor.stride()))
    with torch.inference_mode(False), mode:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)


def _check_general(shape_env: ShapeEnv, most: int) -> None:
    """Raises ValueError if the code is right only for some numbers of rows: nothing would notice that later."""
    tried = (MIN_ROWS, MIN_ROWS + 1, most - 1, most)
    for guard in shape_env.guards:
        symbols = sorted(guard.expr.free_symbols, key=str)
        for rows in product(tried, repeat=len(symbols)):
            if not guard.expr.subs(dict(zip(symbols, rows, strict=True))):
                raise ValueError(f"Inductor's code for a piece is right only where {guard.expr}: not for {rows} rows")
