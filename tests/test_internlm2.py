"""InternLM2 checkpoints are read as the Llama models they are, exactly or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import specstream
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.models.internlm2 import load_internlm2
from specstream.models.load import load_model
from tests.internlm2_cases import PROMPT, SETTINGS, Settings, Weights, greedy, internlm2, logits_of, make_weights, write


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 2), (4, 1)])
def test_logits_are_internlm2s(tmp_path: Path, heads: int, kv_heads: int, bias: bool) -> None:
    settings = SETTINGS | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "bias": bias}
    weights = make_weights(settings)
    logits = logits_of(write(tmp_path, settings, weights), PROMPT)
    expected = internlm2(settings, weights, PROMPT)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_another_order_of_fused_rows_is_another_model(tmp_path: Path) -> None:
    """The negative twin: all queries, then all keys, then all values, as other formats have them."""
    weights = make_weights(SETTINGS)
    for name in (name for name in weights if "wqkv" in name):
        fused = weights[name].view(2, 4, 8, 32)
        weights[name] = torch.cat([part.flatten(0, -2) for part in (fused[:, :2], fused[:, 2], fused[:, 3])])
    logits = logits_of(write(tmp_path, SETTINGS, weights), PROMPT)
    assert (logits - internlm2(SETTINGS, make_weights(SETTINGS), PROMPT)).abs().max() > 0.1


@pytest.mark.parametrize(("kv_heads", "bias"), [(4, False), (2, True), (1, False)])
def test_streamed_tokens_are_internlm2s(tmp_path: Path, kv_heads: int, bias: bool) -> None:
    settings = SETTINGS | {"num_key_value_heads": kv_heads, "bias": bias}
    weights = make_weights(settings)
    target = write(tmp_path / "target", settings, weights)
    # A draft that is often right: the target with a little noise.
    close = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    draft = write(tmp_path / "draft", settings, close)
    with specstream.compile(
        target, draft, dtype=torch.float64, chunk_tokens=4, max_model_len=64, gpu_kv_budget="min", debug=True
    ) as engine:
        out: Any = engine.generate(torch.tensor([PROMPT]), max_new_tokens=24, eos_token_id=[])
        metrics = engine.metrics()
    assert out[0].tolist() == greedy(settings, weights, PROMPT, 24)
    assert metrics.streamed_bytes > 0
    assert metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("form", ["sharded safetensors", "bin", "sharded bin", "old bin"])
def test_forms_of_a_checkpoint_are_one_model(tmp_path: Path, form: str) -> None:
    weights = make_weights(SETTINGS)
    single = load_internlm2(write(tmp_path / "single", SETTINGS, weights), torch.float64).state_dict()
    other = load_internlm2(write(tmp_path / "other", SETTINGS, weights, form), torch.float64).state_dict()
    assert single.keys() == other.keys()
    assert all(torch.equal(single[name], other[name]) for name in single)


def test_dtype_is_the_one_asked_for_or_the_stated_one_or_the_checkpoints(tmp_path: Path) -> None:
    directory = write(tmp_path, SETTINGS, make_weights(SETTINGS))
    assert load_internlm2(directory, torch.float16).dtype == torch.float16
    model = load_internlm2(directory)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (model.config.dtype, model.training) == (torch.bfloat16, False)
    assert next(load_model(directory, device="cpu")[0].parameters()).dtype == torch.float32
    (directory / "config.json").write_text(json.dumps(SETTINGS | {"torch_dtype": None}))
    assert load_internlm2(directory).dtype == torch.float64


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_model_does_not_change_with_its_file(tmp_path: Path, form: str) -> None:
    directory = write(tmp_path, SETTINGS, make_weights(SETTINGS), form)
    model = load_internlm2(directory, torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for file in (*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.bin")):
        with file.open("r+b") as stored:
            stored.write(bytes(file.stat().st_size))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stored", [True, False])
def test_tied_embeddings(tmp_path: Path, stored: bool) -> None:
    settings = SETTINGS | {"tie_word_embeddings": True}
    weights = make_weights(settings)
    weights["output.weight"] = weights["model.tok_embeddings.weight"].clone()
    kept = weights if stored else {name: value for name, value in weights.items() if name != "output.weight"}
    directory = write(tmp_path, settings, kept, "sharded safetensors")
    model = load_internlm2(directory, torch.float64)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(directory, PROMPT), internlm2(settings, weights, PROMPT), rtol=0, atol=1e-10)


def without(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(name)


def with_(name: str, value: Tensor) -> Callable[[Weights], None]:
    return lambda weights: weights.__setitem__(name, value)


NORM, WQKV = "model.layers.1.ffn_norm.weight", "model.layers.0.attention.wqkv.weight"
BAD_TENSORS: dict[str, tuple[Callable[[Weights], None], Settings, str]] = {
    "missing": (without(NORM), {}, rf"missing: {NORM}\."),
    "no head": (without("output.weight"), {}, r"missing: output\.weight\."),
    "unexpected": (with_("model.extra.weight", torch.ones(2)), {}, r"unexpected: model\.extra\.weight\."),
    "shape": (
        with_(WQKV, torch.ones(64, 16)),
        {},
        rf"wrong shape or type: {WQKV} \(torch.float32 \[64, 16\].*\[64, 32\]",
    ),
    "integers": (with_(NORM, torch.ones(32, dtype=torch.int8)), {}, rf"wrong shape or type: {NORM} \(torch.int8"),
    "group": (lambda weights: None, {"num_key_value_heads": 4}, rf"type: {WQKV} .*\[96, 32\].*layers\.1\.attention"),
    "no bias": (lambda weights: None, {"bias": True}, r"missing: model\.layers\.0\.attention\.wqkv\.bias, "),
    "bias": (with_("model.layers.0.attention.wo.bias", torch.ones(32)), {}, r"unexpected: .*\.wo\.bias"),
    "layers": (lambda weights: None, {"num_hidden_layers": 3}, r"missing: model\.layers\.2\."),
    "many": (lambda weights: None, {"num_hidden_layers": 9}, r"missing: .* and 41 more\."),
    "other head": (lambda weights: None, {"tie_word_embeddings": True}, r"output\.weight differs from"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, case: str) -> None:
    change, settings, text = BAD_TENSORS[case]
    weights = make_weights(SETTINGS)
    change(weights)
    directory = write(tmp_path, SETTINGS | settings, weights)
    with pytest.raises(InvalidOption, match=text) as refused:
        load_model(directory, device="cpu")
    assert str(directory) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    weights = make_weights(SETTINGS)
    weights["model.norms.weight"] = weights.pop("model.norm.weight")
    with pytest.raises(InvalidOption, match=r"missing: model\.norm\.weight; unexpected: model\.norms\.weight"):
        load_model(write(tmp_path, SETTINGS, weights), device="cpu")


BAD_SETTINGS: list[tuple[Settings, str]] = [
    ({"rms_norm_eps": None}, r"config\.json: rms_norm_eps: got None"),
    ({"bias": None}, r"config\.json: bias: got None"),
    ({"rope_theta": None}, r"config\.json: rope_theta: got None"),
    ({"rope_scaling": {"type": "wavy", "factor": 2.0}}, r"rope_scaling: got .*wavy.*default, linear, dynamic, yarn"),
    ({"rope_scaling": {"type": "yarn"}}, r"config\.json.*Missing required keys.*factor"),
    ({"rope_scaling": "dynamic"}, r"config\.json"),
    ({"hidden_act": "wavy"}, r"hidden_act: got 'wavy'.*silu"),
    ({"architectures": ["InternLM2ForRewardModel"]}, r"architectures: got \['InternLM2ForRewardModel'\]"),
    ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config: got .*awq"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads: got 3; .* 4 attention heads"),
    ({"num_attention_heads": 5}, r"hidden size \(32\) is not a multiple"),
    ({"hidden_size": "32"}, r"'hidden_size' expected int"),
]


@pytest.mark.parametrize(("change", "text"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_settings_that_cannot_be_mapped_are_refused(tmp_path: Path, change: Settings, text: str) -> None:
    directory = write(tmp_path, SETTINGS | change, {})
    with pytest.raises(InvalidOption, match=text) as refused:
        load_model(directory, device="cpu")
    assert "\n" not in str(refused.value)


def test_files_that_are_absent_or_broken_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(InvalidOption, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_model(tmp_path, device="cpu")
    for form in ("sharded safetensors", "sharded bin"):
        directory = write(tmp_path / form, SETTINGS, make_weights(SETTINGS), form)
        shard = next(directory.glob("*-00002-of-00003.*"))
        shard.write_bytes(shard.read_bytes()[:-200])
        with pytest.raises(InvalidOption, match=f"{shard.name} cannot be read"):
            load_model(directory, device="cpu")
        shard.unlink()
        with pytest.raises(InvalidOption, match=f"files that are not there: {shard.name}"):
            load_model(directory, device="cpu")


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """Remote code in every file that a checkpoint of InternLM2 brings; it leaves a mark and raises."""
    directory = write(tmp_path / "traps", SETTINGS, make_weights(SETTINGS))
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise RuntimeError('remote code ran')\n"
    for kind in ("configuration", "modeling", "tokenization"):
        (directory / f"{kind}_internlm2.py").write_text(trap)
    auto_map = {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}
    tokenizer = {"tokenizer_class": "InternLM2Tokenizer", "auto_map": auto_map}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def test_remote_code_never_runs(tmp_path: Path, traps: Path, root: Path) -> None:
    model, tokenizer, name = load_model(traps, torch.float64, "cpu")
    assert (type(model).__name__, tokenizer, name) == ("LlamaForCausalLM", None, "traps")
    (traps / "tokenizer.model").write_bytes(b"a sentencepiece model")
    assert load_model(traps, device="cpu")[1] is None
    (traps / "tokenizer.json").write_bytes((root / "models/tiny/target/tokenizer.json").read_bytes())
    tokenizer = load_model(traps, device="cpu")[1]
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.decode(tokenizer("It was a truth").input_ids) == "It was a truth"
    (traps / "config.json").write_text(json.dumps(SETTINGS | {"model_type": "internlm9"}))
    with pytest.raises(InvalidOption, match="traps"):
        load_model(traps, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_code_in_a_pickle_never_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "ran"), "w")

    directory = write(tmp_path / "model", SETTINGS, {})
    (directory / "model.safetensors").unlink()
    torch.save({"output.weight": Trap()}, directory / "pytorch_model.bin")
    with pytest.raises(InvalidOption, match=r"pytorch_model\.bin cannot be read: UnpicklingError"):
        load_model(directory, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_dynamic_rope_is_plain_within_its_positions_and_refused_beyond(tmp_path: Path) -> None:
    directory = write(tmp_path, SETTINGS, make_weights(SETTINGS))
    with specstream.compile(directory, None) as engine:
        assert engine.memory.max_model_len == 128
    with pytest.raises(
        UnsupportedModel, match=r"dynamic RoPE .*max_model_len <= 128, or rope_type 'yarn' with factor 3"
    ):
        specstream.compile(directory, None, max_model_len=300)
    yarn = SETTINGS | {"rope_scaling": {"rope_type": "yarn", "factor": 3}}
    with specstream.compile(write(tmp_path, yarn, make_weights(SETTINGS)), None, max_model_len=300) as engine:
        assert engine.memory.max_model_len == 300


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_other_ways_to_state_the_rotary_embedding(tmp_path: Path, rope: Settings) -> None:
    weights = make_weights(SETTINGS)
    logits = logits_of(write(tmp_path, SETTINGS | rope, weights), PROMPT)
    torch.testing.assert_close(logits, internlm2(SETTINGS, weights, PROMPT), rtol=0, atol=1e-10)


def test_linear_rope_stretches_positions(tmp_path: Path) -> None:
    linear, weights = SETTINGS | {"rope_scaling": {"type": "linear", "factor": 2.0}}, make_weights(SETTINGS)
    logits = logits_of(write(tmp_path, linear, weights), PROMPT)
    torch.testing.assert_close(logits, internlm2(linear, weights, PROMPT), rtol=0, atol=1e-10)
    assert (logits - internlm2(SETTINGS, weights, PROMPT)).abs().max() > 0.1


def test_end_tokens_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    directory = write(tmp_path, SETTINGS, make_weights(SETTINGS))
    assert load_internlm2(directory).generation_config.eos_token_id == 2
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "pad_token_id": 3}))
    defaults = load_internlm2(directory).generation_config
    assert (defaults.eos_token_id, defaults.pad_token_id) == ([2, 7], 3)
