"""The families of docs/models.md: each supported one gives transformers' own tokens, each other one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import specstream
from specstream.errors import UnsupportedModel
from tests.architectures import VOCAB, from_config
from tests.families import FAMILIES

SUPPORTED = [name for name, family in FAMILIES.items() if not family.refusal]
REFUSED = [name for name, family in FAMILIES.items() if family.refusal]
OPTIONS: dict[str, Any] = {"chunk_tokens": 4, "max_model_len": 128, "gpu_kv_budget": "min", "debug": True}


@pytest.mark.parametrize("name", SUPPORTED)
def test_streamed_tokens_are_those_of_transformers(name: str) -> None:
    """Greedily in float64, with all KV but the least streamed."""
    target: Any = from_config(FAMILIES[name].make())
    batch = [torch.randint(3, VOCAB, (1, length)) for length in (1, 6, 50)]
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with specstream.compile(target, None, **OPTIONS) as engine:
        for ids in batch:
            theirs = target.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
            assert engine.generate(ids, **arguments).tolist() == theirs.tolist()  # type: ignore[union-attr]
        assert engine.metrics().streamed_bytes > 0
    assert len(set(theirs[0, 50:].tolist())) > 3, "a text that repeats itself proves little"


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name: str) -> None:
    target = from_config(FAMILIES[name].make())
    with pytest.raises(UnsupportedModel) as refused:
        specstream.compile(target, None, max_model_len=128)
    assert FAMILIES[name].refusal in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_window_that_hides_nothing_is_supported() -> None:
    """The refusals' twin: the same families, with requests no longer than the window."""
    for name in ("Mistral with window", "OLMo 3", "Gemma 3", "EXAONE 4 with window", "Cohere Command R7B, A"):
        target: Any = from_config(FAMILIES[name].make())
        ids = torch.randint(3, VOCAB, (1, 40))
        with specstream.compile(target, None, **OPTIONS | {"max_model_len": 64}) as engine:
            ours: Any = engine.generate(ids, max_new_tokens=20, eos_token_id=None)
        theirs = target.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert ours.tolist() == theirs.tolist(), name


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_experts_that_cannot_be_captured_are_told_which_can(how: str) -> None:
    target: Any = from_config(FAMILIES["Mixtral"].make())
    target.set_experts_implementation(how)
    with pytest.raises(UnsupportedModel) as refused:
        specstream.compile(target, None, max_model_len=128)
    assert str(refused.value).endswith(
        'Call model.set_experts_implementation("batched_mm") first: it works in every dtype and as one graph.'
    )


def test_the_page_lists_these_families_and_verdicts(root: Path) -> None:
    page = (root / "docs/models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    elsewhere = {"InternLM2, InternLM2.5": "supported"}  # tests/test_internlm2.py
    verdicts = {name: "refused" if family.refusal else "supported" for name, family in FAMILIES.items()}
    assert {row[0]: row[1] for row in rows[1:]} == verdicts | elsewhere
    for row in rows[1:]:
        files = row[3].split(", ")
        assert all((root / "tests" / f"{name}.py").exists() for name in files), row
