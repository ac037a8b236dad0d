"""Joined projections: what is joined, what it costs, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specstream.compiler import compile_model
from specstream.graph import AttentionSite
from specstream.ops import stream_verify
from specstream.passes.fuse_projections import FuseProjections
from specstream.pipeline import PassRunner
from specstream.probe import run_pieces
from specstream.structure import structure_of
from tests.architectures import ARCHITECTURES, VOCAB
from tests.helpers import captured, model


def attend(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = stream_verify(q, k, v, 0, site.spec.scale)
    return out


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_numbers_stay(name: str) -> None:
    plain = captured(model(name))
    runner = PassRunner("m")
    fused = runner.run((FuseProjections(),), plain)
    layers = plain.spec.num_layers
    joined_already = name in ("phi3", "plain_mask", "plain_repeat")
    assert runner.records[0].op_changes.get("linear", 0) == (0 if joined_already else -3 * layers)
    assert fused.weight_bytes == plain.weight_bytes
    keys = [structure_of(piece).key for piece in fused.pieces]
    assert len(set(keys)) == len({structure_of(piece).key for piece in plain.pieces})
    for rows, logit_rows in ((2, 1), (9, 9)):
        given = torch.randint(VOCAB, (1, rows)), torch.arange(rows)[None], torch.arange(logit_rows)
        with torch.no_grad():
            logits, expected = run_pieces(fused, given, attend), run_pieces(plain, given, attend)
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_large_weights_stay_apart_and_the_cost_is_known() -> None:
    plain = captured(model("qwen3"))  # hidden 32, of which q 32, k 16, v 16; gate and up 48 each; float64
    projections, feed_forward = 32 * 64 * 8, 32 * 96 * 8
    step = FuseProjections(most_bytes=projections)
    runner = PassRunner("m")
    fused = runner.run((step,), plain)
    assert runner.records[0].op_changes["linear"] == -2 * 3
    assert step.extra_bytes(plain) == 3 * projections
    assert FuseProjections().extra_bytes(plain) == 3 * (projections + feed_forward)
    assert FuseProjections(most_bytes=projections - 1).extra_bytes(plain) == 0
    assert step.extra_bytes(fused) == 0


def test_check_finds_what_is_apart() -> None:
    with pytest.raises(ValueError, match="piece 0 computes linear, linear_1, linear_2 apart"):
        FuseProjections().check(captured(model("qwen3")))


class TwoInputs(nn.Module):
    """Projections with biases, of which one reads something else; k is viewed over rows and heads together."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + position_ids[..., None].to(self.head.weight.dtype).sin()
        k = (self.k(x).view(-1, 8) * 1.5).view(1, -1, 2, 8).transpose(1, 2)
        q = self.q(x).view(1, -1, 2, 8).transpose(1, 2)
        v = self.v(x.tanh()).view(1, -1, 2, 8).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_only_maps_of_one_input_are_joined() -> None:
    plain = compile_model(TwoInputs().eval().double(), "m", None)
    runner = PassRunner("m")
    fused = runner.run((FuseProjections(),), plain)
    assert runner.records[0].op_changes["linear"] == -1
    given = torch.randint(VOCAB, (1, 7)), torch.arange(7)[None], torch.arange(7)
    with torch.no_grad():
        torch.testing.assert_close(run_pieces(fused, given, attend), run_pieces(plain, given, attend))
