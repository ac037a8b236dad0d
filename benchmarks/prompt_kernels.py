"""Library kernels for the attention of prompts that return the log-sum-exp: torch's flash kernel and cuDNN's.

    python benchmarks/prompt_kernels.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--shape ROWSxKEYS[c] ...]

Needs a CUDA device. For each shape, causal with a `c`: milliseconds of either; what cuDNN's first call costs, which
plans for the shape; and how far the two differ in their outputs and in their log-sum-exps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CALLS = 5
SHAPES = ("8192x16384", "8192x8192c", "8190x8190c", "7168x16384", "8192x16896", "2048x16384", "1024x512", "512x16384")
Outputs = tuple[Tensor, Tensor]
"""out [1, heads, rows, head_dim] and lse [1, heads, rows]."""


@dataclass(frozen=True)
class Shape:
    rows: int
    keys: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> Shape:
        rows, keys = text.removesuffix("c").split("x")
        return cls(int(rows), int(keys), text.endswith("c"))


def flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Outputs:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False)
    return out, lse


def cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Outputs:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(query, key, value, None, True, 0.0, causal, False)
    return out, lse.reshape(lse.shape[:3])


def milliseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def row(shape: Shape, heads: int, kv_heads: int, head_dim: int) -> str:
    """The measured line of a shape."""

    def random(count: int, tokens: int) -> Tensor:  # token-major queries, head-major keys, as the engine has them
        return torch.randn(1, count, tokens, head_dim, device="cuda", dtype=torch.bfloat16)

    query = random(heads, shape.rows).transpose(1, 2).contiguous().transpose(1, 2)
    key, value = random(kv_heads, shape.keys), random(kv_heads, shape.keys)
    given = query, key, value, shape.causal
    expected, expected_lse = flash(*given)
    of_flash = milliseconds(lambda: flash(*given))
    try:
        first = milliseconds(lambda: cudnn(*given), 1)
        of_cudnn = milliseconds(lambda: cudnn(*given))
        out, lse = cudnn(*given)
    except RuntimeError as error:
        return f"{of_flash:>9.3f}  cuDNN refuses: {str(error).splitlines()[0]}"
    difference, of_lse = (out - expected).abs().max().item(), (lse - expected_lse).abs().max().item()
    return f"{of_flash:>9.3f} {of_cudnn:>9.3f} {first:>9.1f} {difference:>9.4f} {of_lse:>9.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="ROWSxKEYS[c]", help=f"({' '.join(SHAPES)})")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'shape':<12} {'flash ms':>9} {'cuDNN ms':>9} {'first ms':>9} {'out':>9} {'lse':>9}")
    for text in given.shape:
        print(f"{text:<12} {row(Shape.parse(text), given.heads, given.kv_heads, given.head_dim)}", flush=True)


if __name__ == "__main__":
    main()
