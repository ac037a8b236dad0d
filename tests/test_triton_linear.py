"""Linear maps of few rows against torch's, at awkward shapes, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from specstream.kernels.triton_linear import MOST_ROWS, choose_linear_tiling, few_row_linears

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    (1, 64, (96,)),
    (2, 576, (576, 192, 192)),
    (5, 130, (7, 33)),
    (16, 64, (8, 1, 40)),
    (3, 1088, (24, 24)),
    (33, 96, (24, 8)),
]


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    drawn: Tensor = torch.randn(*shape) / shape[-1] ** 0.5
    return drawn.to(DEVICE, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_equals_torchs(rows: int, inputs: int, outputs: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, weights = random(rows, inputs), [random(n, inputs) for n in outputs]
    biases = [random(n) for n in outputs] if bias else []
    got = few_row_linears(x, weights, biases)
    for index, out in enumerate(got):
        expected = F.linear(x.double(), weights[index].double(), biases[index].double() if bias else None)
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = random(2, 96, dtype=torch.bfloat16), random(40, 96, dtype=torch.bfloat16)
    (got,) = few_row_linears(x, [weight])
    torch.testing.assert_close(got.double(), F.linear(x.double(), weight.double()), rtol=2e-2, atol=2e-2)


def test_rows_and_weights_with_strides() -> None:
    torch.manual_seed(0)
    x, weight = random(4, 200)[:, :128], random(24, 200)[:, 8:136]
    (got,) = few_row_linears(x, [weight])
    torch.testing.assert_close(got.double(), F.linear(x.double(), weight.double()), rtol=2e-3, atol=2e-3)


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, weight = random(16, 256), random(48, 256)
    (together,), (alone,) = few_row_linears(x, [weight]), few_row_linears(x[:1], [weight])
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("rows", [1, 16, 17, MOST_ROWS])
@pytest.mark.parametrize("outputs", [16, 1024, 4096, 6144, 24576, 151936])
@pytest.mark.parametrize("inputs", [64, 576, 896, 4096, 12288])
def test_every_tiling_is_one_that_a_device_takes(rows: int, outputs: int, inputs: int) -> None:
    tiling = choose_linear_tiling(rows, outputs, inputs, 2)
    assert tiling.block_rows >= max(rows, 16)
    assert 8 <= tiling.block_out <= 64
    assert tiling.block_in >= 64
    assert tiling.num_stages >= 2
    assert (tiling.block_out + tiling.block_rows) * tiling.block_in * 2 * tiling.num_stages <= 96 << 10


@pytest.mark.parametrize(
    ("inputs", "outputs", "programs", "stages"),
    [(4096, 4096, 128, 5), (4096, 6144, 192, 4), (4096, 24576, 384, 3), (12288, 4096, 128, 5), (1024, 1024, 128, 5)],
)
def test_all_programs_run_at_a_time_on_an_h200(inputs: int, outputs: int, programs: int, stages: int) -> None:
    tiling = choose_linear_tiling(1, outputs, inputs, 2, 227 << 10, 132)
    assert outputs // tiling.block_out == programs
    assert tiling.num_stages == stages
