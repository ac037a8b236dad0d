"""SwiGLU as one call: which forms are fused, which are left alone, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specstream.compiler import compile_model
from specstream.ops import swiglu
from specstream.passes.fuse_swiglu import FuseSwiglu
from specstream.passes.group_linears import GroupLinears
from specstream.pipeline import PassRunner
from specstream.probe import run_pieces
from specstream.structure import structure_of
from tests.architectures import ARCHITECTURES, VOCAB
from tests.helpers import captured, model
from tests.test_group_linears import attend

WIDTH = 16
Mlp = Callable[[Any, Tensor], Any]
"""(model, x) -> what the map down reads."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_numbers_stay(name: str) -> None:
    plain = captured(model(name))
    fused = PassRunner("m").run((FuseSwiglu(),), plain)
    before, counts = plain.op_counts(), fused.op_counts()
    layers = 0 if name in ("gemma", "plain_mask", "plain_repeat") else plain.spec.num_layers
    assert counts["swiglu"] == layers == before["silu"]
    assert counts["silu"] == 0
    assert before["mul"] - counts["mul"] == layers
    assert before["linear"] - counts["linear"] == layers * (1 if name == "phi3" else 2)
    assert fused.weight_bytes == plain.weight_bytes
    keys = [structure_of(piece).key for piece in fused.pieces]
    assert len(set(keys)) == len({structure_of(piece).key for piece in plain.pieces})
    grouped = PassRunner("m").run((GroupLinears(),), fused)
    assert grouped.op_counts()["linear"] == 0
    for rows, logit_rows in ((2, 1), (9, 9)):
        given = torch.randint(VOCAB, (1, rows)), torch.arange(rows)[None], torch.arange(logit_rows)
        with torch.no_grad():
            expected = run_pieces(plain, given, attend)
            for pieces in (fused, grouped):
                torch.testing.assert_close(run_pieces(pieces, given, attend), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_weights_are_the_models_own(name: str) -> None:
    plain = captured(model(name))
    for before, after in zip(plain.pieces, FuseSwiglu().run(plain).pieces, strict=True):
        own = {tensor.data_ptr() for tensor in structure_of(before).weights}
        assert {tensor.data_ptr() for tensor in structure_of(after).weights} == own


def test_check_finds_what_is_left() -> None:
    with pytest.raises(ValueError, match=r"piece 1 computes the SwiGLU mul_\d+ by itself"):
        FuseSwiglu().check(captured(model("qwen3")))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_op_equals_torchs(rows: int, bias: bool) -> None:
    x, (gate, up) = torch.randn(1, rows, 12), torch.randn(2, 7, 12)
    biases = [*torch.randn(2, 7)] if bias else []
    expected = F.silu(F.linear(x, gate, *biases[:1])) * F.linear(x, up, *biases[1:])
    torch.testing.assert_close(swiglu(x, [gate, up], biases), expected)
    joined = swiglu(x, [torch.cat([gate, up])], [torch.cat(biases)] if bias else [])
    torch.testing.assert_close(joined, expected)
    meta = swiglu(x.to("meta"), [gate.to("meta"), up.to("meta")], [one.to("meta") for one in biases])
    assert (meta.shape, meta.stride()) == (expected.shape, expected.stride())


class Toy(nn.Module):
    """One attention without projections, then what a test makes of its output with two linear maps or one of both."""

    def __init__(self, mlp: Mlp, bias: bool = True) -> None:
        super().__init__()
        self.mlp = mlp
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=bias), nn.Linear(WIDTH, 24, bias=bias)
        self.plain, self.one = nn.Linear(WIDTH, 24, bias=not bias), nn.Linear(WIDTH, 1, bias=bias)
        self.both, self.down = nn.Linear(WIDTH, 48, bias=bias), nn.Linear(24, VOCAB, bias=False)
        self.silu = nn.SiLU()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + position_ids[..., None].to(self.down.weight.dtype).sin()
        heads = x.view(1, -1, 2, WIDTH // 2).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.down(self.mlp(self, x + out.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def product_read_twice(toy: Any, x: Tensor) -> Any:
    product = F.silu(toy.gate(x)) * toy.up(x)
    return product + product.tanh()


def halves(toy: Any, x: Tensor) -> Any:
    gate, up = toy.both(x).chunk(2, -1)
    return F.silu(gate) * up


def halves_swapped(toy: Any, x: Tensor) -> Any:
    up, gate = toy.both(x).chunk(2, dim=-1)
    return up * F.silu(gate)


def third_of_three(toy: Any, x: Tensor) -> Any:
    gate, up, _ = toy.both(x).chunk(3, dim=-1)
    return F.pad(F.silu(gate) * up, (0, 8))


def gate_read_twice(toy: Any, x: Tensor) -> Any:
    gate = toy.gate(x)
    return F.silu(gate) * toy.up(x) + gate


def silu_read_twice(toy: Any, x: Tensor) -> Any:
    silu = F.silu(toy.gate(x))
    return silu * toy.up(x) + silu


def up_read_twice(toy: Any, x: Tensor) -> Any:
    up = toy.up(x)
    return F.silu(toy.gate(x)) * up + up


def in_place(toy: Any, x: Tensor) -> Any:
    return F.silu(toy.gate(x), inplace=True) * toy.up(x)


FUSED: dict[str, Mlp] = {
    "operator": lambda toy, x: F.silu(toy.gate(x)) * toy.up(x),
    "up first": lambda toy, x: toy.up(x) * F.silu(toy.gate(x)),
    "module": lambda toy, x: torch.mul(toy.silu(toy.gate(x)), toy.up(x)),
    "method": lambda toy, x: toy.silu(toy.gate(x)).mul(toy.up(x)),
    "product read twice": product_read_twice,
    "halves": halves,
}
LEFT_ALONE: dict[str, Mlp] = {
    "gelu": lambda toy, x: F.gelu(toy.gate(x)) * toy.up(x),
    "sum": lambda toy, x: F.silu(toy.gate(x)) + toy.up(x),
    "two inputs": lambda toy, x: F.silu(toy.gate(x)) * toy.up(x.tanh()),
    "one bias": lambda toy, x: F.silu(toy.gate(x)) * toy.plain(x),
    "broadcast": lambda toy, x: F.silu(toy.gate(x)) * toy.one(x),
    "no map": lambda toy, x: F.silu(toy.gate(x)) * toy.up(x).tanh(),
    "a number": lambda toy, x: F.silu(toy.gate(x)) * 2 + toy.up(x),
    "itself": lambda toy, x: F.silu(toy.gate(x)) * F.silu(toy.up(x)),
    "gate read twice": gate_read_twice,
    "silu read twice": silu_read_twice,
    "up read twice": up_read_twice,
    "in place": in_place,
    "halves swapped": halves_swapped,
    "thirds": third_of_three,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [*FUSED, *LEFT_ALONE])
def test_forms(form: str, bias: bool) -> None:
    plain = compile_model(Toy((FUSED | LEFT_ALONE)[form], bias).eval().double(), "m", None)
    fused = PassRunner("m").run((FuseSwiglu(),), plain)
    assert fused.op_counts()["swiglu"] == (form in FUSED)
    if form in LEFT_ALONE:
        assert fused.op_counts() == plain.op_counts()
    given = torch.randint(VOCAB, (1, 7)), torch.arange(7)[None], torch.arange(7)
    with torch.no_grad():
        torch.testing.assert_close(run_pieces(fused, given, attend), run_pieces(plain, given, attend))
