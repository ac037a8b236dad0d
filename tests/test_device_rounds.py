"""Rounds whose acceptance and drafting are the kernels', in Triton's interpreter, against the rules of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specstream import cuda_draft, draft
from specstream.device_rounds import DeviceRounds
from specstream.draft import DraftWindow
from specstream.engine import Engine
from specstream.kernels import accept as accept_module
from specstream.kernels import process as process_module
from specstream.kernels import tiling
from tests.helpers import captured, make_engine, model, prompt

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other; and blocks are to be crossed by short texts."""
    monkeypatch.setattr(tiling, "MAX_SPLITS", 1)
    monkeypatch.setattr(accept_module, "TILE", 64)
    monkeypatch.setattr(process_module, "TILE", 128)
    monkeypatch.setattr(cuda_draft, "BLOCK_TOKENS", 8)
    for module in (cuda_draft, draft):
        monkeypatch.setattr(module, "FEED_TOKENS", 8)
    monkeypatch.setattr(cuda_draft.CudaDrafter, "_capture", lambda *_: None)


def tiny(seed: int = 0) -> torch.nn.Module:
    return model("qwen3", torch.float32, seed, layers=1)


def engine_of(target: Any, drafting: Any, kernels: bool, **options: Any) -> Engine:
    """An engine that drafts as on a CUDA device, its acceptance and drafts launched as kernels if asked."""
    given = {"max_model_len": 64, "chunk_tokens": 8, "max_num_seqs": 3} | options
    engine = make_engine(target, drafting, **given)
    speculator, spec = engine._speculator, captured(target).spec
    drafter = None
    if drafting is not None:
        window = DraftWindow(given["max_model_len"], given.get("draft_window"), given.get("draft_sink", 4))
        drafter = cuda_draft.CudaDrafter(captured(drafting), window, spec.vocab_size, given["max_num_seqs"])
        speculator.drafter = drafter
    if kernels:
        depth, seats = engine.options.num_speculative_tokens, engine.options.max_num_seqs
        speculator.kernels = DeviceRounds(speculator.speculation, drafter, depth, seats, spec.vocab_size, spec.device)
    return engine


def texts(engine: Engine, prompts: list[list[int]], **arguments: Any) -> tuple[Any, ...]:
    """What an engine generates, and how it got there."""
    with engine:
        out: Any = engine.generate(prompts, return_dict_in_generate=True, **arguments)
        metrics = engine.metrics()
    counts = metrics.num_draft_tokens, metrics.num_accepted_tokens, metrics.accepted_per_position
    return [each.token_ids for each in out.requests], [each.finish_reason for each in out.requests], counts


def check_same(target: Any, drafting: Any, prompts: list[list[int]], options: dict[str, Any], **arguments: Any) -> Any:
    host, device = (
        texts(engine_of(target, drafting, kernels, **options), prompts, **arguments) for kernels in (False, True)
    )
    assert device == host
    return device


PROMPTS = [list(prompt(9)), list(prompt(21, 1)), list(prompt(4, 2))]
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": [1, 2, 3], "temperature": 0.8}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("drafting", ["none", "other", "itself"])
def test_greedy(depth: int, drafting: str) -> None:
    drafter = {"none": None, "other": tiny(1)}.get(drafting, tiny())
    _, _, (proposed, accepted, _) = check_same(
        tiny(), drafter, PROMPTS, {"num_speculative_tokens": depth}, max_new_tokens=12
    )
    assert accepted == (proposed if drafting == "itself" else accepted)


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize("draft_method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("depth", [1, 3])
def test_sampling(method: str, draft_method: str, depth: int) -> None:
    options = {
        "num_speculative_tokens": depth,
        "rejection_sample_method": method,
        "draft_sample_method": draft_method,
    }
    _, _, (proposed, accepted, _) = check_same(tiny(), tiny(1), PROMPTS, options, max_new_tokens=10, **SAMPLED)
    assert 0 < accepted < proposed
