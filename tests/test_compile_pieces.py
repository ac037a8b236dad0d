"""Pieces compiled by Inductor: which are of one kind, what they compute, what a call costs. On the CPU, in C++."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._inductor import compile_fx
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specstream.api import build_engine
from specstream.compiler import compile_model, lower_model
from specstream.graph import AttentionSite, PartitionedModel, Piece
from specstream.ops import stream_verify
from specstream.options import Options
from specstream.passes.compile_pieces import CompiledPiece, CompilePieces, _check_general
from specstream.passes.fuse_swiglu import FuseSwiglu
from specstream.passes.group_linears import GroupLinears
from specstream.pipeline import PassRunner
from specstream.probe import run_pieces
from specstream.structure import structure_of, with_weight_inputs
from tests.architectures import ARCHITECTURES, VOCAB, build
from tests.helpers import captured, model, prompt, reference

try:
    get_cpp_compiler()
    HAS_COMPILER = True
except InvalidCxxCompiler:
    HAS_COMPILER = False

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="Inductor needs a C++ compiler for the CPU")


def attend(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the rows of one call, without history."""
    out: Tensor = stream_verify(q, k, v, 0, site.spec.scale)
    return out


def inputs(rows: int, logit_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(VOCAB, (1, rows)), torch.arange(rows)[None], torch.randint(rows, (logit_rows,))


def kinds_of(pieces: tuple[Piece, ...]) -> list[int]:
    """For each piece the index of the first of its kind."""
    keys = [structure_of(piece).key for piece in pieces]
    return [keys.index(key) for key in keys]


# Kinds


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_share_a_kind(name: str) -> None:
    layers: dict[str, Any] = {"layers": 3} if name.startswith("plain") else {"num_hidden_layers": 3}
    partitioned = compile_model(build(name, **layers), name, None)
    assert kinds_of(partitioned.pieces) == [0, 1, 1, 3]
    piece = partitioned.pieces[1]
    shared = with_weight_inputs(piece, structure_of(piece))
    assert not [*shared.parameters(), *shared.buffers()]
    assert len(shared.graph.find_nodes(op="placeholder")) == len(piece.inputs) + len(structure_of(piece).weights)


def toy(width: int = 4, eps: Any = 1.0, names: str = "ab", dtype: torch.dtype = torch.float32) -> Piece:
    """(x + eps) * a + b, a and b being weights of those names."""
    root = nn.Module()
    graph = fx.Graph()
    x = graph.placeholder(f"x_{names}")
    x.meta["example_value"] = torch.zeros(2, width, dtype=dtype)
    for name in names:
        root.register_buffer(name, torch.full((width,), float(ord(name)), dtype=dtype))
    product = graph.call_function(torch.mul, (graph.call_function(torch.add, (x, eps)), graph.get_attr(names[0])))
    graph.output((graph.call_function(torch.add, (product, graph.get_attr(names[1]))),))
    return Piece(fx.GraphModule(root, graph), (x.name,), ("y",), ())


def test_names_and_values_of_weights_make_no_kind() -> None:
    assert kinds_of((toy(names="ab"), toy(names="ba"), toy(names="cd"))) == [0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [toy(eps=1.5), toy(eps=1), toy(eps=True), toy(width=5), toy(dtype=torch.float64), toy(names="aa")],
    ids=["constant", "int", "bool", "width", "dtype", "one weight twice"],
)
def test_what_computes_otherwise_is_of_another_kind(other: Piece) -> None:
    assert kinds_of((toy(), other)) == [0, 1]


def test_strides_of_a_weight_make_a_kind() -> None:
    other = toy()
    other.module.a = torch.zeros(4, 2)[:, 0]
    assert kinds_of((toy(), other)) == [0, 1]


# Compiled

ROWS = [(2, 1), (2, 2), (5, 5), (5, 0), (33, 1), (64, 40), (600, 3)]
"""(N, R). Tiny rounds, catching up without logits, reading a prompt."""


@pytest.fixture(scope="module")
def plain() -> PartitionedModel:
    return captured(model("smollm", torch.float32))


@pytest.fixture(scope="module")
def compilations() -> Iterator[list[fx.GraphModule]]:
    """What Inductor is given, in this module."""
    given: list[fx.GraphModule] = []
    original: Callable[..., Any] = compile_fx.compile_fx

    def noting(module: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        given.append(module)
        return original(module, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_fx, "compile_fx", noting)
        yield given


@pytest.fixture(scope="module")
def compiled(plain: PartitionedModel, compilations: list[fx.GraphModule]) -> PartitionedModel:
    return lower_model(model("smollm", torch.float32), plain, None)


@needs_compiler
def test_each_kind_is_compiled_once_for_all_rows(
    plain: PartitionedModel, compiled: PartitionedModel, compilations: list[fx.GraphModule]
) -> None:
    assert [piece.kind for piece in compiled.pieces if isinstance(piece, CompiledPiece)] == [0, 1, 1, 1, 1, 2]
    for rows, logit_rows in ROWS:
        given = inputs(rows, logit_rows)
        with torch.no_grad():
            expected = run_pieces(plain, given, attend)
            logits = run_pieces(compiled, given, attend)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert len(compilations) == 3  # and none while running


@needs_compiler
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_pieces_run_in_every_mode(plain: PartitionedModel, compiled: PartitionedModel, mode: Any) -> None:
    given = inputs(7, 2)
    with mode():
        expected = run_pieces(plain, given, attend)
        logits = run_pieces(compiled, given, attend)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_dumps_and_counts_stay(plain: PartitionedModel, compiled: PartitionedModel) -> None:
    assert compiled.op_counts() == GroupLinears().run(FuseSwiglu().run(plain)).op_counts()
    assert compiled.weight_bytes == plain.weight_bytes
    assert [p.read_bytes for p in compiled.pieces] == [p.read_bytes for p in plain.pieces]
    assert compiled.to_text().count(", compiled as kind 1\n") == 4


@needs_compiler
def test_weights_are_the_models_own(compiled: PartitionedModel) -> None:
    """Not copies: weights are most of a device's memory."""
    target = model("smollm", torch.float32)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*target.parameters(), *target.buffers())}
    for piece in compiled.pieces:
        assert isinstance(piece, CompiledPiece)
        assert {tensor.untyped_storage().data_ptr() for tensor in piece.weights} <= storages


@needs_compiler
def test_an_attention_of_another_layout_is_refused(compiled: PartitionedModel) -> None:
    """Code for contiguous inputs would read the wrong numbers."""

    def transposed(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(site, q, k, v).contiguous()

    with pytest.raises(AssertionError, match="stride"), torch.no_grad():
        run_pieces(compiled, inputs(5, 1), transposed)


@needs_compiler
def test_check_finds_what_is_wrong(plain: PartitionedModel, compiled: PartitionedModel) -> None:
    def with_piece(index: int, piece: Piece) -> PartitionedModel:
        pieces = (*compiled.pieces[:index], piece, *compiled.pieces[index + 1 :])
        return dataclasses.replace(compiled, pieces=pieces)

    first, second, third, *_ = compiled.pieces
    assert isinstance(first, CompiledPiece)
    assert isinstance(second, CompiledPiece)
    assert isinstance(third, CompiledPiece)
    checks = CompilePieces()
    checks.check(compiled)
    with pytest.raises(ValueError, match="piece 1 is not compiled"):
        checks.check(with_piece(1, plain.pieces[1]))
    with pytest.raises(ValueError, match="piece 2 does not have its own weights"):
        checks.check(with_piece(2, dataclasses.replace(third, weights=second.weights)))
    with pytest.raises(ValueError, match="piece 2 does not share the code of its kind"):
        checks.check(with_piece(2, dataclasses.replace(third, function=lambda *given: second.function(*given))))
    with pytest.raises(ValueError, match="pieces of different kinds share code"):
        checks.check(with_piece(0, dataclasses.replace(first, function=second.function)))


@needs_compiler
def test_engine_on_compiled_pieces_decodes_the_target(compiled: PartitionedModel) -> None:
    target = model("smollm", torch.float32)
    options = Options(chunk_tokens=4, max_model_len=64, gpu_kv_budget="64KiB", num_speculative_tokens=3)
    engine = build_engine(options, compiled, compiled)
    ids = prompt(17)
    output = engine.generate([list(ids)], max_new_tokens=12)
    engine.close()
    assert output[0, len(ids) :].tolist() == reference(target, ids, 12).tokens


@needs_compiler
@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_rows_may_be_fixed_and_linear_maps_joined(name: str) -> None:
    plain = compile_model(build(name, torch.float32, num_hidden_layers=1), "m", None)
    fixed = PassRunner("m").run((FuseSwiglu(), GroupLinears(), CompilePieces(rows=6, logit_rows=2)), plain)
    given = inputs(6, 2)
    with torch.no_grad():
        logits = run_pieces(fixed, given, attend)
        torch.testing.assert_close(logits, run_pieces(plain, given, attend), rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError, match="expected size"):
            run_pieces(fixed, inputs(7, 2), attend)


def test_code_for_some_numbers_of_rows_only_is_refused() -> None:
    shape_env = ShapeEnv()
    symbol = shape_env.create_unspecified_symbol(40, source=ConstantSource("rows"))
    rows = shape_env.create_symintnode(symbol, hint=40, source=ConstantSource("rows"))
    _check_general(shape_env, 100)
    assert rows < 64  # what a compiler may ask, to choose
    with pytest.raises(ValueError, match=r"not for \(99,\) rows"):
        _check_general(shape_env, 100)


@needs_compiler
def test_what_a_call_costs(compiled: PartitionedModel, plain: PartitionedModel) -> None:
    """Printed: microseconds of a middle piece of two rows. Compiling anew, or checking guards, would show."""
    piece, interpreted = compiled.pieces[1], plain.pieces[1]
    values = dict(zip(compiled.inputs, inputs(2, 1), strict=True))
    site = compiled.sites[0]
    with torch.no_grad():
        compiled.pieces[0].run(values)
        values[site.out] = attend(site, values[site.query], values[site.key], values[site.value])
        given = [values[name] for name in piece.inputs]
        fast, slow = _microseconds(lambda: piece.compute(given)), _microseconds(lambda: interpreted.compute(given))
    print(f"\na piece of 2 rows: {fast:.1f} us compiled, {slow:.1f} us interpreted")
    assert fast < 3 * slow


def _microseconds(call: Callable[[], object], calls: int = 200) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best
