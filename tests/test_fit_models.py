"""Models that `specstream.plan` is given: what an engine would refuse, or accept with a notice, it says too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import specstream
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.fit import plan
from specstream.models.tiny import DRAFT, TARGET


def changed(folder: Path, **settings: Any) -> Path:
    """The configuration of the bundled draft with other settings, beside its tokenizer."""
    shutil.copytree(DRAFT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: a positive number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: a positive number"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: a divisor of the "),
        ({"num_hidden_layers": 0}, "num_hidden_layers: a positive number"),
        ({"hidden_size": -64}, "hidden_size: a positive number"),
        ({"vocab_size": 0}, "vocab_size: a positive number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: a positive number"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"pad_token_id": 100_000}, "AssertionError"),
    ],
)
def test_configurations_of_no_model_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = changed(tmp_path / "made", **settings)
    with pytest.raises(InvalidOption) as refused:
        plan(folder, None, context=64)
    assert str(refused.value).startswith("target: got")
    assert said in str(refused.value)
    assert "config.json" in str(refused.value)


def test_quantised_weights_have_no_known_sizes(tmp_path: Path) -> None:
    folder = changed(tmp_path / "made", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match=r"^draft: its weights are quantised \(gptq\)"):
        plan(TARGET, folder, context=64, device="h200")


def test_settings_of_quantisation_that_an_engine_skips_are_noted(tmp_path: Path) -> None:
    folder = changed(tmp_path / "made", quantization_config={"quant_method": "unheard of"})
    (note,) = plan(folder, None, context=64).notes
    assert "transformers does not know 'unheard of'" in note


def test_settings_of_quantisation_without_a_method_are_refused_as_by_an_engine(tmp_path: Path) -> None:
    folder = changed(tmp_path / "made", quantization_config={"bits": 4})
    with pytest.raises(InvalidOption, match="target: got") as planned:
        plan(folder, None, context=64)
    with pytest.raises(InvalidOption, match="target: got") as engine:
        specstream.compile(folder, device="cpu")
    assert planned.value.way_out.partition(" gave ")[2] == engine.value.way_out.partition(" gave ")[2] != ""


def test_a_draft_whose_tokens_are_others_is_refused_as_by_an_engine(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidOption, match="a tokenizer whose id") as planned:
        plan(TARGET, folder, context=64)
    with pytest.raises(InvalidOption, match="a tokenizer whose id") as engine:
        specstream.compile(TARGET, folder, device="cpu", max_model_len=64)
    assert str(planned.value) == str(engine.value)


def test_vocabularies_of_other_sizes_are_noted_where_the_tokens_are_not_known() -> None:
    notes = plan("qwen3-0.6b", "smollm2-135m", context=4096).notes
    assert any("151936 and 49152 tokens" in note for note in notes)
    assert not any("tokens: with weights" in note for note in plan("qwen3-8b", "qwen3-0.6b", context=4096).notes)


def test_a_refusal_says_which_model_is_meant(tmp_path: Path) -> None:
    folder = changed(
        tmp_path / "made", use_sliding_window=True, sliding_window=32, max_window_layers=0, layer_types=None
    )
    with pytest.raises(UnsupportedModel, match=r"^draft model\.layers\.0\.self_attn: it attends to a sliding window"):
        plan(TARGET, folder, context=64)
