"""The probe: models that know the past by more than their attention are refused, and only those."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor, nn

from specstream.capture import forward_of
from specstream.compiler import compile_model
from specstream.errors import UnsupportedModel
from specstream.probe import _compare, probe
from tests.architectures import VOCAB, PlainMask, build


class TokenShift(PlainMask):
    """Mixes each row with the row before it, as RWKV does."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        x = x + 0.1 * nn.functional.pad(x, (0, 0, 1, -1))
        for block in self.blocks:
            x = block(x, self.mask(input_ids, position_ids))
        return self.head(x)  # type: ignore[no-any-return]


class Convolution(PlainMask):
    """A causal convolution over the tokens after the attentions."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.conv = nn.Conv1d(32, 32, 3, groups=32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        x = self.blocks[0](x, self.mask(input_ids, position_ids))
        x = x + self.conv(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return self.head(x)  # type: ignore[no-any-return]


class ArangePositions(PlainMask):
    """Learned positions looked up by row number instead of by position_ids."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)
        return super().forward(input_ids, rows[None])


class Pooling(PlainMask):
    """Adds the mean of all rows so far."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        count = torch.ones_like(logits[..., :1]).cumsum(1)
        return logits + 0.05 * logits.cumsum(1) / count


class LongestText(PlainMask):
    """Scales every row by the largest position in the batch: right for one request, wrong for rows of two."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(input_ids, position_ids) * (1 + 0.1 * position_ids.max())


class FarPositions(PlainMask):
    """Every 300 tokens, counted from the start of the call, things change."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        far = input_ids.new_ones(1, input_ids.shape[1]).cumsum(1) > 300
        return super().forward(torch.where(far, 0, input_ids), position_ids)


class FarShift(PlainMask):
    """Mixes in what stood 300 tokens ago."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits + 0.2 * torch.where(position_ids[..., None] >= 300, logits.roll(300, 1), 0.0)


@pytest.mark.parametrize("kind", [FarPositions, FarShift])
def test_what_shows_only_in_longer_texts(kind: type[PlainMask]) -> None:
    with pytest.raises(UnsupportedModel, match="cut at tokens 320 and 512"):
        compile_model(kind(layers=1).eval().double(), "m", None)


def test_a_module_with_too_few_positions_is_told_so() -> None:
    class Learned(PlainMask):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.learned = nn.Embedding(100, VOCAB)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            added: Tensor = self.learned(position_ids)
            return super().forward(input_ids, position_ids) + added

    compile_model(Learned().eval().double(), "m", 100)
    with pytest.raises(UnsupportedModel, match=r"it does not run on 640 tokens .* Set max_model_len"):
        compile_model(Learned().eval().double(), "m", None)


STRANGE = [TokenShift, Convolution, ArangePositions, Pooling, LongestText]
STRONG = [Convolution, ArangePositions, LongestText]
"""Those whose mixture does not drown in the rounding of bfloat16."""


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, torch.float64) for kind in STRANGE] + [(kind, torch.bfloat16) for kind in STRONG]
)
def test_models_that_know_the_past_otherwise(kind: type[PlainMask], dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModel, match="run in segments") as refused:
        compile_model(kind(layers=1).eval().to(dtype), "m", None)
    text = str(refused.value)
    found = re.search(r"by (\S+) of their size at token (\d+), in segment (\d) \(largest difference", text)
    assert found is not None, text
    assert float(found[1]) > 1e-3
    assert "cut at tokens 11 and 18" in text
    if kind is not LongestText:
        assert int(found[2]) >= 11
        assert int(found[3]) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "plain_mask"])
def test_rounding_is_no_difference(name: str, dtype: torch.dtype) -> None:
    partitioned = compile_model(build(name, dtype), name, None)
    assert partitioned.spec.dtype == dtype


OUTLIERS = {"few": ([30, 234, 400], True), "many": (list(range(20, 34)), False), "at a cut": ([323], False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "accepted"), OUTLIERS.values(), ids=OUTLIERS)
def test_a_few_rows_of_half_precision_may_be_ties(rows: list[int], accepted: bool, dtype: torch.dtype) -> None:
    expected = torch.randn(640, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = expected.clone()
    got[rows] *= 1.5
    if accepted and dtype != torch.float32:
        _compare(got, expected, 640)
    else:
        with pytest.raises(UnsupportedModel, match="run in segments"):
            _compare(got, expected, 640)


@pytest.mark.parametrize("limit", [3, 10])
def test_short_models(limit: int) -> None:
    """No more positions are used than the model has."""
    compile_model(build("llama", max_position_embeddings=limit), "m", None)
    compile_model(build("plain_mask", layers=1), "m", limit)


def test_global_random_state_is_left_alone() -> None:
    model = build("plain_mask", layers=1)
    partitioned = compile_model(model, "m", None)
    before = torch.random.get_rng_state()
    probe(forward_of(model), partitioned, max_model_len=None)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_wrong_scale_is_seen() -> None:
    model = build("plain_mask", layers=1)
    partitioned = compile_model(model, "m", None)
    (site,) = partitioned.sites
    wrong = dataclasses.replace(site, spec=dataclasses.replace(site.spec, scale=site.spec.scale * 1.1))
    with pytest.raises(UnsupportedModel):
        probe(forward_of(model), dataclasses.replace(partitioned, sites=(wrong,)), max_model_len=None)
