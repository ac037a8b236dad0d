"""A draft with a window that begins with a long text leaves out what lies far behind the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specstream import draft as draft_module
from specstream.draft import Drafter, DraftWindow
from tests.helpers import captured, make_engine, model, prompt, reference

WINDOW = DraftWindow(256, window=16, sink=4)


@pytest.fixture(autouse=True)
def short_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_module, "FEED_TOKENS", 24)


def drafter_of(kind: str, monkeypatch: pytest.MonkeyPatch, layers: int = 1) -> tuple[Drafter, list[int]]:
    """A drafter of the CPU's, or of a device; and how many tokens it computes in each call."""
    graph = captured(model("qwen3", torch.float32, layers=layers))
    made: Drafter
    if kind == "host":
        made = Drafter(graph, WINDOW, graph.spec.vocab_size, 2)
    else:
        pytest.importorskip("triton")
        from specstream import block_window, cuda_draft
        from specstream.kernels import tiling

        monkeypatch.setattr(block_window, "BLOCK_TOKENS", 8)
        monkeypatch.setattr(block_window, "FEED_TOKENS", 24)
        monkeypatch.setattr(tiling, "MAX_SPLITS", 1)
        made = cuda_draft.CudaDrafter(graph, WINDOW, graph.spec.vocab_size, 2)
    computed: list[int] = []
    feed = made._feed

    def counted(rows: dict[int, list[int]], *, logits: bool) -> dict[int, torch.Tensor]:
        computed.append(sum(map(len, rows.values())))
        return feed(rows, logits=logits)

    monkeypatch.setattr(made, "_feed", counted)
    return made, computed


@pytest.mark.parametrize("kind", ["host", pytest.param("device", marks=pytest.mark.interpreter)])
def test_what_is_left_out_is_seen_by_nobody(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model of one layer, whose keys depend on their own token alone, it makes no difference at all."""
    text = list(prompt(200))
    briefly, computed = drafter_of(kind, monkeypatch)
    logits = [briefly.start({0: text})[0], *(briefly.extend({0: token})[0] for token in (5, 7))]
    logits.append(briefly.start({0: [*text, 5, 9]})[0])
    assert sum(computed) < 70
    assert briefly._seats[0].length == len(text) + 2
    monkeypatch.setattr(Drafter, "_leave_out", lambda *_: False)
    wholly, computed = drafter_of(kind, monkeypatch)
    expected = [wholly.start({0: text})[0], *(wholly.extend({0: token})[0] for token in (5, 7))]
    expected.append(wholly.start({0: [*text, 5, 9]})[0])
    assert sum(computed) > 200
    for mine, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_short_text_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, computed = drafter_of("host", monkeypatch)
    drafter.start({0: list(prompt(2 * 16 + 4 + 23))})
    assert sum(computed) == 2 * 16 + 4 + 23
    assert drafter._seats[0].since == 0


@pytest.mark.parametrize("drafting", ["sequential", "cohorts"])
def test_the_tokens_stay_the_targets(drafting: str) -> None:
    target = model("qwen3")
    options: dict[str, Any] = {"max_model_len": 256, "gpu_kv_budget": "min", "chunk_tokens": 8, "draft_window": 16}
    with make_engine(target, target, drafting=drafting, max_num_seqs=3, **options) as engine:
        prompts = [prompt(200), prompt(90, 1), prompt(150, 2)]
        out: Any = engine.generate([list(ids) for ids in prompts], max_new_tokens=30, return_dict_in_generate=True)
    for ids, request in zip(prompts, out.requests, strict=True):
        assert request.token_ids == reference(target, ids, 30).tokens
