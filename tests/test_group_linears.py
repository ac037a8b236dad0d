"""Linear maps of one input as one call: what is joined, and that weights and numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specstream.compiler import compile_model
from specstream.graph import AttentionSite
from specstream.ops import stream_verify
from specstream.passes.group_linears import GroupLinears
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
    grouped = runner.run((GroupLinears(),), plain)
    counts, before = grouped.op_counts(), plain.op_counts()
    assert counts["linear"] == 0
    assert counts["linears"] <= before["linear"]
    joined_already = name in ("phi3", "plain_mask", "plain_repeat")
    assert before["linear"] - counts["linears"] == (0 if joined_already else 3 * plain.spec.num_layers)
    assert grouped.weight_bytes == plain.weight_bytes
    keys = [structure_of(piece).key for piece in grouped.pieces]
    assert len(set(keys)) == len({structure_of(piece).key for piece in plain.pieces})
    for rows, logit_rows in ((2, 1), (9, 9)):
        given = torch.randint(VOCAB, (1, rows)), torch.arange(rows)[None], torch.arange(logit_rows)
        with torch.no_grad():
            logits, expected = run_pieces(grouped, given, attend), run_pieces(plain, given, attend)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_weights_are_the_models_own() -> None:
    plain = captured(model("qwen3"))
    grouped = GroupLinears().run(plain)
    for before, after in zip(plain.pieces, grouped.pieces, strict=True):
        own = {tensor.data_ptr() for tensor in structure_of(before).weights}
        assert {tensor.data_ptr() for tensor in structure_of(after).weights} == own


def test_check_finds_what_is_left() -> None:
    with pytest.raises(ValueError, match="piece 0 computes linear, linear_1, linear_2 by itself"):
        GroupLinears().check(captured(model("qwen3")))


class TwoInputs(nn.Module):
    """Projections with biases: one reads something else, one is called by names, k is viewed over rows and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + position_ids[..., None].to(self.head.weight.dtype).sin()
        k = (self.k(x).view(-1, 8) * 1.5).view(1, -1, 2, 8).transpose(1, 2)
        q = F.linear(bias=self.q.bias, weight=self.q.weight, input=x).view(1, -1, 2, 8).transpose(1, 2)
        v = self.v(x.tanh()).view(1, -1, 2, 8).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_only_maps_of_one_input_are_joined() -> None:
    plain = compile_model(TwoInputs().eval().double(), "m", None)
    grouped = PassRunner("m").run((GroupLinears(),), plain)
    assert grouped.op_counts()["linears"] == plain.op_counts()["linear"] - 1
    given = torch.randint(VOCAB, (1, 7)), torch.arange(7)[None], torch.arange(7)
    with torch.no_grad():
        torch.testing.assert_close(run_pieces(grouped, given, attend), run_pieces(plain, given, attend))
