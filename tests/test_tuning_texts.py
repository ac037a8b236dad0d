"""Tuning with texts: trials decode them, acceptance is theirs, and a draft's window is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specstream.engine import Engine
from specstream.errors import InvalidOption
from specstream.options import Options
from specstream.trial import Stopwatch
from specstream.tuned_settings import TunedSettings
from specstream.tuning import best_trial
from specstream.workload import Workload
from tests.helpers import captured, model, prompt
from tests.test_tuning import OPEN, SMALL, engine, new_engine, own_folder, settings_of, short_trials, tokens

__all__ = ["engine", "own_folder", "short_trials"]  # fixtures


def test_texts_are_decoded_for_real_and_decide_on_the_window() -> None:
    prompts = [list(prompt(150 + 20 * seed, seed)) for seed in range(2)]
    options = OPEN | {"draft_window": "auto"}
    with new_engine(**options) as engine:
        assert engine.memory.draft_kv == draft_kv_of(None)
        before = tokens(engine)
        trials = engine.tune(prompts=prompts, most_trials=5).trials
        assert tokens(engine) == before
        found = engine.parts.speculator.drafter
        best = best_trial(list(trials))
        assert best is not None
        assert found is not None
        assert found.window.window == best.settings.draft_window
    assert all(trial.acceptance is not None and 0 <= trial.acceptance <= 1 for trial in trials)
    assert trials[0].settings.draft_window is None, "as untuned"
    assert len({trial.settings.draft_window for trial in trials}) > 1
    with new_engine(**options) as other:
        assert settings_of(other) == best.settings


def test_tensors_and_arrays_are_prompts_too(engine: Engine) -> None:
    ids = torch.tensor([list(prompt(40)), list(prompt(40, 1))])
    for prompts in (ids, ids.numpy(), list(ids), tuple(each.numpy() for each in ids)):
        found = engine.tune(prompts=prompts, most_trials=1)
        assert found.best is not None
        assert found.workload.acceptance == found.best.acceptance


def test_sinks_go_with_a_window_that_tuning_may_find_to_be_all() -> None:
    """An engine that is compiled with both goes on without sinks where nothing is left out."""
    options = OPEN | {"draft_window": "auto", "draft_sink": 8}
    with new_engine(**options) as engine:
        engine.tune(most_trials=1)
    with new_engine(**options) as engine:
        assert (engine.options.draft_window, engine.options.draft_sink) == (None, Options.draft_sink)


def draft_kv_of(window: int | None) -> int:
    with new_engine(**OPEN | {"draft_window": window}) as engine:
        return engine.memory.draft_kv


def test_the_rate_of_texts_is_what_they_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second a round, and a draft that is the target: every candidate is right."""
    target = captured(model("qwen3"))
    options = Options(**SMALL | {"num_speculative_tokens": 3, "drafting": "sequential"})
    prompts = [list(prompt(60)), list(prompt(90, 1))]
    seconds = iter(range(10_000))
    workload, draft = Workload(256, 2, 0.5), captured(model("qwen3"))
    stopwatch = Stopwatch(options, target, draft, workload, clock=lambda: next(seconds), prompts=prompts)
    settings = TunedSettings(16, 2, 2, 3, "sequential")
    assert stopwatch.rate(settings, 0.0) == 2 * 4
    assert stopwatch.acceptance == 1.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompts": []}, "prompts: got 'none'; allowed: a list of prompts, each a list of token ids."),
        ({"prompts": "a text"}, "prompts: got 'a str'; allowed: a list of prompts, each a list of token ids."),
        ({"prompts": {"input_ids": [[1]]}}, "each a list of token ids. Give its input_ids."),
        ({"prompts": ["a"]}, "prompts: got 'a str among them'; allowed: a list of prompts, each a list of token ids."),
        ({"prompts": torch.tensor([1, 2])}, "Put a single prompt into a list."),
        ({"prompts": [[1]], "batch": 2}, "prompts: got '1 prompts'; allowed: as many as batch=2."),
        ({"prompts": [[1], [2], [3]]}, "prompts: got '3 prompts'; allowed: at most 2, the engine's max_num_seqs."),
        ({"prompts": [[1]], "acceptance": 0.5}, "allowed: None with prompts. It is measured"),
        ({"prompts": [[1], [10_000]]}, "10000"),
    ],
    ids=str,
)
def test_prompts_that_cannot_be_had(engine: Engine, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        engine.tune(**arguments)
    assert text in str(refused.value)
    assert tokens(engine), "it is as usable as before"
