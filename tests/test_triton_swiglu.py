"""SwiGLU kernels against torch's ops, at awkward shapes, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from specstream import ops
from specstream.kernels.triton_linear import MOST_ROWS, choose_linear_tiling
from specstream.kernels.triton_swiglu import few_row_swiglu, silu_and_mul
from tests.test_triton_linear import DEVICE, random

SHAPES = [(1, 64, 96), (2, 576, 48), (5, 130, 33), (16, 64, 1), (3, 1088, 24), (33, 96, 8)]
"""(rows, inputs, outputs)."""


def reference(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """In float64."""
    given = [operand.double() for operand in (*weights, *biases)]
    gate, up = (F.linear(x.double(), *given[index::2]) for index in range(2))
    return F.silu(gate) * up


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_equals_torchs(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    x, weights = random(rows, inputs), [random(outputs, inputs) for _ in range(2)]
    biases = [random(outputs) for _ in range(2)] if bias else []
    got = few_row_swiglu(x, weights, biases)
    torch.testing.assert_close(got.double(), reference(x, weights, biases), rtol=2e-3, atol=2e-3)


def test_bfloat16() -> None:
    x, weights = random(2, 96, dtype=torch.bfloat16), [random(40, 96, dtype=torch.bfloat16) for _ in range(2)]
    got = few_row_swiglu(x, weights)
    torch.testing.assert_close(got.double(), reference(x, weights, []), rtol=2e-2, atol=2e-2)


def test_rows_and_weights_with_strides() -> None:
    """Gate and up as the halves of one weight, and as columns of two."""
    x, joined = random(4, 200)[:, :128], random(48, 200)[:, 8:136]
    for weights in ([*joined.chunk(2)], [joined[:24], random(24, 300)[:, 40:168]]):
        got = few_row_swiglu(x, weights)
        torch.testing.assert_close(got.double(), reference(x, weights, []), rtol=2e-3, atol=2e-3)


def test_gate_and_up_are_not_the_same() -> None:
    x, (gate, up) = random(2, 64), [random(24, 64) for _ in range(2)]
    swapped = few_row_swiglu(x, [up, gate])
    assert not torch.allclose(swapped.double(), reference(x, [gate, up], []), rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_neither_overflow_nor_vanish() -> None:
    x = torch.ones(1, 16, dtype=torch.float16, device=DEVICE)
    gate, up = torch.tensor([[-2000.0], [2000.0]]).expand(2, 16).to(x), torch.full_like(x, 1 / 16).expand(2, 16)
    assert few_row_swiglu(x, [gate, up]).tolist() == [[0.0, 32000.0]]


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weights = random(16, 256), [random(48, 256) for _ in range(2)]
    assert torch.equal(few_row_swiglu(x, weights)[:1], few_row_swiglu(x[:1], weights))


@pytest.mark.parametrize("rows", [1, 16, 17, MOST_ROWS])
@pytest.mark.parametrize("outputs", [16, 1024, 3072, 24576])
@pytest.mark.parametrize("inputs", [64, 576, 4096])
def test_every_tiling_is_one_that_a_device_takes(rows: int, outputs: int, inputs: int) -> None:
    tiling = choose_linear_tiling(rows, outputs, inputs, 2, least_out=16)
    assert 16 <= tiling.block_out <= 64
    assert (tiling.block_out + tiling.block_rows) * tiling.block_in * 2 * tiling.num_stages <= 96 << 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (1, 3, 1030), (2, 3, 64), (0, 24)])
def test_activation_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = (3 * torch.randn(2, *shape)).to(DEVICE, dtype)
    got, expected = silu_and_mul(gate, up), F.silu(gate.float()) * up.float()
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-5)


def test_activation_of_the_halves_of_one_result() -> None:
    both = torch.randn(1, 5, 70).to(DEVICE, torch.float16)
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(gate, up), (F.silu(gate.float()) * up.float()).half())


@pytest.mark.parametrize("rows", [0, 3, 65])
def test_op_takes_the_kernels(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many, two weights and both as one, as on a CUDA device."""
    monkeypatch.setattr(ops, "_has_kernels", lambda x: True)
    monkeypatch.setattr(F, "silu", None)
    x, weights, biases = random(1, rows, 40), random(2, 24, 40), random(2, 24)
    for operands in (([*weights], []), ([*weights], [*biases]), ([weights.flatten(0, 1)], [biases.flatten()])):
        got = ops.swiglu(x, *operands)
        assert got.shape == (1, rows, 24)
        gate, up = (F.linear(x.double(), weights[i].double(), biases[i].double() * bool(operands[1])) for i in (0, 1))
        torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=4e-3, atol=4e-3)
