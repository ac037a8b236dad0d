"""Compiled pieces on the device: what they compute in bfloat16, and all of them in one CUDA graph."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3Config

from specstream.compiler import compile_model, lower_model
from specstream.graph import AttentionSite, PartitionedModel
from specstream.ops import stream_verify, swiglu
from specstream.passes.compile_pieces import CompiledPiece
from specstream.probe import run_pieces

VOCAB = 4096


@pytest.fixture(scope="module")
def target() -> nn.Module:
    """Two layers of Qwen3-8B's shape, random, with a small vocabulary."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


@pytest.fixture(scope="module")
def plain(target: nn.Module) -> PartitionedModel:
    return compile_model(target, "qwen3", 1024)


@pytest.fixture(scope="module")
def compiled(target: nn.Module, plain: PartitionedModel) -> PartitionedModel:
    return lower_model(target, plain, 1024)


def attend(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = stream_verify(q, k, v, 0, site.spec.scale)
    return out


def inputs(rows: int, logit_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(VOCAB, (1, rows), device="cuda")
    return ids, torch.arange(rows, device="cuda")[None], torch.randint(rows, (logit_rows,), device="cuda")


def apart(got: Tensor, expected: Tensor) -> float:
    """The largest |difference| / |row|."""
    wide = expected.double()
    return float(((got.double() - wide).norm(dim=-1) / wide.norm(dim=-1)).max())


@pytest.mark.parametrize(("rows", "logit_rows"), [(2, 1), (2, 2), (8, 0), (40, 8), (264, 264), (2048, 1)])
@torch.inference_mode()
def test_compiled_pieces_compute_what_interpreted_ones_do(
    plain: PartitionedModel, compiled: PartitionedModel, rows: int, logit_rows: int
) -> None:
    given = inputs(rows, logit_rows)
    logits, expected = run_pieces(compiled, given, attend), run_pieces(plain, given, attend)
    assert logits.shape == expected.shape == (1, logit_rows, VOCAB)
    if logit_rows:
        assert apart(logits, expected) < 0.03


def test_gate_and_up_in_one_weight() -> None:
    """As Phi-3 has them; few rows and many."""
    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain = compile_model(model, "phi3", 1024)
    compiled = lower_model(model, plain, 1024)
    assert compiled.op_counts()["swiglu"] == 2
    with torch.inference_mode():
        for rows in (2, 40, 264):
            given = inputs(rows, 2)
            assert apart(run_pieces(compiled, given, attend), run_pieces(plain, given, attend)) < 0.03


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 65, 1000])
@torch.inference_mode()
def test_swiglu(rows: int, dtype: torch.dtype) -> None:
    """Few rows and many, two weights and both as one, with biases and without."""
    x, weights = torch.randn(1, rows, 1000), torch.randn(2, 1536, 1000) / 1000**0.5
    x, weights, biases = (given.to("cuda", dtype) for given in (x, weights, torch.randn(2, 1536)))
    for all_biases in ([], [*biases]):
        gate, up = (F.linear(x.double(), weights[i].double()) for i in range(2))
        if all_biases:
            gate, up = gate + biases[0].double(), up + biases[1].double()
        joined = [biases.flatten()] if all_biases else []
        for got in (swiglu(x, [*weights], all_biases), swiglu(x, [weights.flatten(0, 1)], joined)):
            assert got.is_contiguous()
            assert got.dtype == dtype
            assert apart(got, F.silu(gate) * up) < 0.01


@torch.inference_mode()
def test_fusing_loses_no_precision(target: nn.Module, plain: PartitionedModel, compiled: PartitionedModel) -> None:
    """Against float64, compiled bfloat16 is at most a little further off than interpreted bfloat16."""
    given = inputs(40, 40)
    logits, rounded = run_pieces(compiled, given, attend), run_pieces(plain, given, attend)
    wide = copy.deepcopy(target).double()
    expected = wide(given[0], position_ids=given[1], use_cache=False).logits[:, given[2]]
    print(f"\nfrom float64: compiled {apart(logits, expected):.4f}, interpreted {apart(rounded, expected):.4f}")
    assert apart(logits, expected) < 1.5 * apart(rounded, expected)


@pytest.mark.parametrize("rows", [2, 40])
@torch.inference_mode()
def test_all_pieces_in_one_graph(compiled: PartitionedModel, rows: int) -> None:
    assert all(isinstance(piece, CompiledPiece) for piece in compiled.pieces)
    static = inputs(rows, 2)
    run = partial(run_pieces, compiled, static, attend)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()  # loads kernels and chooses among them, which a capture may not
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = run()
    for _ in range(3):
        given = inputs(rows, 2)
        for destination, source in zip(static, given, strict=True):
            destination.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert apart(logits, run_pieces(compiled, given, attend)) < 0.01
