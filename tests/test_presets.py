"""Shapes of public models: their sizes, their positions, and random weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from specstream.errors import InvalidOption
from specstream.models.presets import dummy_model, preset_config
from specstream.models.rope import max_positions


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("qwen3-8b", 8_190_735_360, 144 << 10),
        ("qwen3-1.7b", 1_720_574_976, 112 << 10),
        ("qwen3-0.6b", 596_049_920, 112 << 10),
        ("internlm2.5-7b", 7_737_708_544, 128 << 10),
        ("internlm2.5-1.8b", 1_889_110_016, 96 << 10),
        ("llama-3.1-8b", 8_030_261_248, 128 << 10),
        ("smollm2-135m", 134_515_008, 23_040),
    ],
)
def test_presets_have_the_published_sizes(name: str, parameters: int, kv_bytes: int) -> None:
    config, note = preset_config(name, 4096)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert (sum(parameter.numel() for parameter in module.parameters()), note) == (parameters, "")
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert each == kv_bytes


@pytest.mark.parametrize(
    ("name", "tokens", "factor"),
    [
        ("qwen3-8b", 40_960, None),
        ("qwen3-8b", 131_072, 4),
        ("qwen3-8b", 131_073, 5),
        ("internlm2.5-7b", 65_536, 2),
        ("llama-3.1-8b", 131_072, None),
        ("tiny", 513, 2),
    ],
)
def test_beyond_its_own_range_a_preset_has_yarn_and_says_so(name: str, tokens: int, factor: int | None) -> None:
    config, note = preset_config(name, tokens)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    reach = max_positions(module)
    assert reach is not None
    assert reach >= tokens
    assert (f"YaRN with factor {factor}" in note) if factor else note == ""
    assert (config.rope_parameters["rope_type"] == "yarn") == (factor is not None)


@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_dummy_model_differs_from_any_other_in_its_weights_alone(tokens: int) -> None:
    config, _ = preset_config("tiny", tokens)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dummy, again, other = (dummy_model(config, torch.bfloat16, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    usual = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    buffers = dict(dummy.named_buffers())
    assert buffers.keys() == dict(usual.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in usual.named_buffers())
    for (name, ours), same, different in zip(
        dummy.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(ours, same)
        assert "norm" in name or not torch.equal(ours, different)
        assert torch.all(ours == 1) if "norm" in name else 0.015 < float(ours.detach().std()) < 0.025
    assert not dummy.training
    assert dummy(torch.arange(90)[None]).logits.isfinite().all()


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(InvalidOption, match="qwen3-8b or"):
        preset_config("qwen3-9b", 64)
