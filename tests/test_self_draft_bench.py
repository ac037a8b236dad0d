"""The benchmarks of self-drafting, at a tiny size with the bundled target: their figures fit together."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specstream.bench_text import NOVEL, Alone, text_prompts
from specstream.cli import UsageError
from specstream.demo_context import load_tokenizer
from tests.helpers import figures_of, script


@pytest.fixture(scope="module")
def self_draft() -> ModuleType:
    return script("self_draft")


def test_a_window_of_everything_proposes_the_targets_own_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "--context", "256", "--prompts", "2", "--new-tokens", "24", "--draft-window", "256"
    figures = figures_of("self_draft", *asked, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert figures["acceptance"] == figures["agreement_on_text"] == 1
    assert figures["tokens"] == 48
    assert figures["rejected"] == figures["differences"] == figures["beyond_near_ties"] == 0
    assert figures["accepted"] + figures["rounds"] + 2 == 48  # the first token of each comes from its prompt


def test_a_window_that_is_too_small_is_often_wrong_and_the_text_is_not_affected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "--context", "200", "300", "--prompts", "1", "--new-tokens", "24", "--draft-window", "16"
    figures = figures_of("self_draft", *asked, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert 0 < figures["acceptance"] < 1
    assert 0 < figures["agreement_on_text"] < 1
    assert figures["differences"] == figures["beyond_near_ties"] == 0
    for name in ("tokens", "rounds", "accepted", "rejected", "positions", "agreeing"):
        assert figures[name] == sum(one[name] for one in figures["contexts"].values())


def test_a_token_that_differs_is_counted_and_the_text_goes_on_from_the_targets(
    self_draft: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is wrong at two places, of which one is a near-tie."""
    own, wrong, asked = [5, 6, 7, 8, 9], {2: 60, 4: 90}, list[list[int]]()

    def decode(engine: Any, prompt: list[int], new_tokens: int, counts: Any) -> list[int]:
        asked.append(prompt)
        first = len(own) - new_tokens
        return [wrong.get(index, own[index]) for index in range(first, len(own))]

    logits = torch.tensor([[gap, 0.0] for gap in (1.0, 1.0, 0.5, 1.0, 1e-5)], dtype=torch.float64)
    monkeypatch.setattr(self_draft, "alone", lambda target, prompt, count: Alone(prompt, own, logits))
    monkeypatch.setattr(self_draft, "decode", decode)
    counts = self_draft.compare(None, None, [1], len(own))
    assert asked == [[1], [1, 5, 6, 7]]
    assert counts.gaps == [0.5, 1e-5]
    counts.rounds = counts.positions = 1
    assert counts.figures()["differences"] == 2
    assert counts.figures()["beyond_near_ties"] == 1


def test_throughput_is_measured_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specstream.rates.LINK_COPY_BYTES", {"cpu": 1 << 20})
    shape = "--batch", "2", "--context", "128", "--new-tokens", "48"
    asked = *shape, "--draft-window", "128", "--depth", "4"
    figures = figures_of("self_draft_throughput", *asked, tmp_path=tmp_path, monkeypatch=monkeypatch)
    drafted, off, sequential = (figures["engines"][name] for name in ("drafted", "off", "sequential"))
    assert figures["over_off"] == pytest.approx(drafted["tokens_per_second"] / off["tokens_per_second"])
    assert figures["over_sequential"] == pytest.approx(drafted["tokens_per_second"] / sequential["tokens_per_second"])
    assert 4 < drafted["mean_acceptance_length"] == sequential["mean_acceptance_length"] < 5  # the last round is short
    assert off["mean_acceptance_length"] == 1
    assert drafted["num_speculative_tokens"] == sequential["num_speculative_tokens"] == 4
    assert (off["num_speculative_tokens"], off["drafting"]) == (0, "off")
    assert (sequential["drafting"], sequential["staging_slots"]) == ("sequential", 4)
    assert min(one["streamed_bytes"] for one in (drafted, off, sequential)) > 0


def test_too_few_rounds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "--batch", "1", "--context", "64", "--new-tokens", "4"
    with pytest.raises(UsageError, match="--new-tokens is too small"):
        figures_of("self_draft_throughput", *asked, tmp_path=tmp_path, monkeypatch=monkeypatch)


def test_prompts_are_spread_over_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    text = tokenizer(NOVEL.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
    first, middle, last = text_prompts(tokenizer, NOVEL, 3, 100)
    assert (first, last) == (text[:100], text[-100:])
    assert middle == text[(len(text) - 100) // 2 :][:100]
    assert text_prompts(tokenizer, NOVEL, 1, 100) == [first]
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(UsageError, match=r"short\.txt: a text of \d+ tokens is too short for a prompt of 100"):
        text_prompts(tokenizer, short, 1, 100)
