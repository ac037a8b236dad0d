"""Shapes from a run on the meta device: exactly what a capture of the model with its weights says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specstream.compiler import compile_model
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.graph import PartitionedModel
from specstream.models.load import load_model
from specstream.models.presets import dummy_model, preset_config
from specstream.models.tiny import DRAFT, TARGET
from specstream.models.unloaded import unloaded_model
from specstream.planner import Planner
from specstream.policy import period_us
from specstream.profiles import H200
from specstream.round_spec import RoundSpec, SeatSpec
from specstream.shapes import ModelShapes, shapes_of
from tests.helpers import captured, model

CPU = torch.device("cpu")


def on_meta(module: nn.Module) -> nn.Module:
    """A model of the same configuration, without values."""
    untyped: Any = module
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(untyped.config, dtype=untyped.dtype)
    return made.eval()


def same(shapes: ModelShapes, real: PartitionedModel) -> None:
    assert replace(shapes.spec, name=real.spec.name) == real.spec
    assert shapes.weight_bytes == real.weight_bytes
    assert [piece.read_bytes for piece in shapes.pieces] == [piece.read_bytes for piece in real.pieces]
    assert [site.spec for site in shapes.sites] == [site.spec for site in real.sites]
    seat = SeatSpec(0, 1, 3, 8, 0, 9, 1)
    spec = RoundSpec(real.spec.num_layers, 4, 2, 16 * real.spec.kv_bytes_per_token_layer, (seat,), 0, 0).warm()
    assert period_us(Planner(shapes, H200), spec) == period_us(Planner(real, H200), spec)


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=["target", "draft"])
def test_the_bundled_pair(folder: Path) -> None:
    module, _, name = load_model(folder, torch.float32, "cpu")
    unloaded, called, _ = unloaded_model("target", folder, 4096, torch.float32)
    shapes = shapes_of(unloaded, called, CPU, 4096)
    same(shapes, compile_model(module, name, 4096))
    assert shapes.spec.name == name


@pytest.mark.parametrize(("name", "tokens"), [("qwen3-8b", 131_072), ("smollm2-135m", 4096)])
def test_presets_at_a_tiny_depth(name: str, tokens: int) -> None:
    config: Any = preset_config(name, tokens)[0]
    config.num_hidden_layers, config.vocab_size = 2, 300
    config.hidden_size, config.intermediate_size = 64, 96
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    real = dummy_model(config, torch.bfloat16)
    same(shapes_of(dummy_model(config, torch.bfloat16, "meta"), name, CPU, tokens), compile_model(real, name, 512))


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma", "granite", "phi3", "smollm"])
def test_other_architectures(name: str) -> None:
    real = model(name)
    shapes = shapes_of(on_meta(real), name, CPU, 64)
    assert replace(shapes.spec, name="") == replace(captured(real).spec, name="")
    assert shapes.weight_bytes == captured(real).weight_bytes
    assert shapes.read_bytes == captured(real).read_bytes


def test_what_needs_values_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Load it and let"):
        shapes_of(ReadsAValue(on_meta(model("qwen3"))), "odd", CPU, 64)


class ReadsAValue(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **_: object) -> object:
        return self.inner(input_ids=input_ids[:, : int(input_ids.max()) + 1])


def test_a_model_is_made_of_a_file_too(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4).save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        module, name, note = unloaded_model("draft", source, 64, None)
        assert (name, note) == (tmp_path.name, "")
        assert {tensor.device.type for tensor in module.parameters()} == {"meta"}
        assert next(module.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, r"draft: got .*; allowed: qwen3-8b, .* with a config\.json"), ("{", "gave"), ('{"a": 1}', "gave")],
)
def test_what_is_no_model_is_refused_by_its_role(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidOption, match=said):
        unloaded_model("draft", tmp_path, 64, None)
