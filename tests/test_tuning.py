"""`engine.tune()`: what it finds is used and kept, changes no token, and is refused where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from specstream.engine import Engine
from specstream.errors import EngineBusy, EngineClosed, InvalidOption, OutOfBudget, SpecStreamWarning
from specstream.parts import make_parts
from specstream.speculate import ASSUMED_ACCEPTANCE
from specstream.trial import Stopwatch, Trial
from specstream.tuned_cache import store_tuned, tuned_file
from specstream.tuned_settings import TunedSettings
from specstream.tuning import Tuning, best_trial
from specstream.workload import Workload
from tests.helpers import make_engine, model, prompt
from tests.test_lookahead import near

SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "gpu_kv_budget": "200KiB"}
OPEN: dict[str, Any] = SMALL | {"num_speculative_tokens": "auto"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARMUP", "BLOCKS", "ROUNDS"):
        monkeypatch.setattr(f"specstream.trial.{name}", 2)
    monkeypatch.setattr("specstream.tuning.give_memory_back", lambda: None)  # which takes longer than such a trial


@pytest.fixture
def engine() -> Iterator[Engine]:
    with new_engine(**OPEN) as made:
        yield made


def new_engine(**options: Any) -> Engine:
    return make_engine(model("qwen3"), near(), **options)


def tokens(engine: Engine, **settings: Any) -> list[list[int]]:
    config = GenerationConfig(**settings) if settings else None
    numbers = [
        engine.submit(list(prompt(150 + 20 * seed)), max_new_tokens=24, generation_config=config, seed=seed)
        for seed in range(2)
    ]
    found: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
    return [found[number] for number in numbers]


def settings_of(engine: Engine) -> TunedSettings:
    memory = engine.memory
    sizes = memory.layout.chunk_tokens, memory.chunks_per_group, memory.staging_slots
    drafting, branches = engine.options.drafting, engine.options.lookahead_branches
    assert drafting != "auto"
    drafter = engine.parts.speculator.drafter
    window, branches = None if drafter is None else drafter.window.window, 0 if branches == "auto" else branches
    return TunedSettings(*sizes, engine.options.most_candidates, drafting, branches, window)


def test_the_engine_goes_on_with_the_best_and_others_like_it_begin_with_it(engine: Engine) -> None:
    told: list[Trial] = []
    found = engine.tune(most_trials=4, told=told.append)
    assert told == list(found.trials)
    assert 2 <= len(told) <= 4
    assert found.best == best_trial(told) is not None
    assert found.best is not None
    assert settings_of(engine) == found.best.settings
    assert found.workload == Workload(256, 2, ASSUMED_ACCEPTANCE)
    assert f"{found.best}  <- best" in str(found)
    assert found.file is not None
    assert found.file.exists()
    with new_engine(**OPEN) as other:
        assert settings_of(other) == found.best.settings
    with new_engine(**OPEN | {"chunk_tokens": 17}) as other:
        assert other.memory.layout.chunk_tokens == 17


def test_what_is_given_is_of_no_effect_on_engines_that_leave_it_open() -> None:
    with new_engine(**OPEN) as other:
        untuned = settings_of(other)
    with new_engine(**OPEN | {"drafting": "lookahead", "num_speculative_tokens": 1}) as engine:
        engine.tune(most_trials=1)
    with new_engine(**OPEN) as other:
        assert settings_of(other) == untuned


def test_what_is_stored_stays_unless_something_is_found_to_be_better(engine: Engine) -> None:
    """It is measured too; if there was no time for that nobody knows."""
    stored = replace(settings_of(engine), group_chunks=3, num_speculative_tokens=2)
    file = tuned_file(engine.parts.requested, engine.parts.target, engine.parts.draft)
    store_tuned(stored, 1.0, engine.parts.target.spec, file)
    short = engine.tune(most_trials=1)
    assert (short.best, short.file) == (None, None)
    assert settings_of(engine) == stored
    with pytest.raises(KeyboardInterrupt):
        engine.tune(told=interrupt)
    assert settings_of(engine) == stored
    found = engine.tune(most_trials=2)
    assert [trial.settings for trial in found.trials][1] == stored
    assert found.best in found.trials
    assert found.best is not None
    assert settings_of(engine) == found.best.settings


def interrupt(_: Trial) -> None:
    raise KeyboardInterrupt


def test_the_first_trial_is_what_would_be_chosen_untuned(engine: Engine) -> None:
    untuned = settings_of(engine)
    best = engine.tune(most_trials=4).best
    assert best is not None
    again = engine.tune(most_trials=2).trials
    assert again[0].settings == untuned
    if best.settings != untuned:
        assert again[1].settings == best.settings


def test_of_two_measurements_of_the_same_settings_the_faster_counts() -> None:
    first, other = TunedSettings(16, 1, 2, 1, "sequential"), TunedSettings(32, 1, 2, 1, "sequential")
    slow, fast, between = (Trial(*each, 1.0) for each in ((first, 5.0, 1.0), (first, 5.0, 9.0), (other, 5.0, 3.0)))
    assert best_trial([slow, between]) is between
    assert best_trial([slow, between, fast]) is fast
    assert best_trial([fast, between, slow]) is fast
    workload = Workload(64, 1, 0.8)
    assert Tuning(workload, (slow, between), between, None).gain == 3.0
    assert Tuning(workload, (slow, between, fast), fast, None).gain == 1.0
    assert Tuning(workload, (replace(slow, tokens_per_second=None),), None, None).gain is None


@pytest.mark.parametrize(
    "settings",
    [{}, {"do_sample": True, "top_k": 0, "temperature": 0.8}],
    ids=["greedy", "coupled"],
)
def test_no_token_depends_on_settings(settings: dict[str, Any]) -> None:
    """In float64 exactly: of every engine that was tried, and of the one that is left."""
    options = OPEN | {"rejection_sample_method": "coupled"}
    with new_engine(**options) as engine:
        before = tokens(engine, **settings)
        trials = engine.tune(most_trials=5).trials
        assert len({trial.settings for trial in trials}) >= 4
        assert tokens(engine, **settings) == before
        assert engine.metrics().streamed_bytes > 0
    for trial in trials:
        made = make_parts(trial.settings.given_to(engine.parts.requested), engine.parts.target, engine.parts.draft)
        with Engine(made) as tried:
            assert tokens(tried, **settings) == before, trial.settings


def test_what_is_given_stays() -> None:
    given: dict[str, Any] = {"chunk_tokens": 24, "num_speculative_tokens": 3}
    with new_engine(**SMALL | given) as engine:
        trials = engine.tune(most_trials=5).trials
        assert len(trials) > 1
        assert {(trial.settings.chunk_tokens, trial.settings.num_speculative_tokens) for trial in trials} == {(24, 3)}
        assert engine.memory.layout.chunk_tokens == 24


def test_a_target_alone_is_tuned_too() -> None:
    with make_engine(model("qwen3"), **SMALL, drafting="off") as engine:
        found = engine.tune(most_trials=4)
        assert {trial.settings.drafting for trial in found.trials} == {"off"}
        assert len(found.trials) > 1
        assert all(trial.tokens_per_second for trial in found.trials)


def test_where_nothing_streams_only_drafting_is_tuned() -> None:
    with new_engine(**OPEN | {"gpu_kv_budget": "8MiB"}) as engine:
        tried = [trial.settings for trial in engine.tune(most_trials=5).trials]
        assert len({(each.chunk_tokens, each.group_chunks, each.staging_slots) for each in tried}) == 1
        assert len({each.num_speculative_tokens for each in tried}) > 1
        assert tokens(engine)
        assert engine.metrics().streamed_bytes == 0


def test_a_smaller_workload(engine: Engine) -> None:
    found = engine.tune(context=128, batch=1, acceptance=0.5, most_trials=2)
    assert found.workload == Workload(128, 1, 0.5)
    assert engine.options.max_num_seqs == 2
    assert engine.memory.max_model_len == 256


def test_no_trial_begins_once_the_time_is_up(engine: Engine) -> None:
    assert len(engine.tune(seconds=1e-9).trials) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"context": 257}, "context: got 257; allowed: an integer from 16 to 256, the engine's max_model_len"),
        ({"context": 8}, "context: got 8"),
        ({"batch": 3}, "batch: got 3; allowed: an integer from 1 to 2, the engine's max_num_seqs"),
        ({"batch": True}, "batch: got True"),
        ({"acceptance": 1.5}, "acceptance: got 1.5; allowed: a number from 0 to 1"),
        ({"seconds": 0}, "seconds: got 0; allowed: a positive number"),
        ({"seconds": float("nan")}, "seconds: got nan"),
        ({"seconds": "90"}, "seconds: got '90'"),
        ({"most_trials": -1}, "most_trials: got -1; allowed: a positive integer"),
        ({"most_trials": 1.5}, "most_trials: got 1.5"),
        ({"told": 5}, "told: got 5; allowed: a function of a Trial"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(engine: Engine, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        engine.tune(**arguments)
    assert str(refused.value).startswith(text)
    assert tokens(engine)


def test_more_requests_than_there_is_memory_for_are_refused() -> None:
    with new_engine(**OPEN | {"gpu_kv_budget": "min"}) as engine:
        with pytest.raises(InvalidOption, match=r"batch: got 2; allowed: at most 1: .* A larger gpu_kv_budget"):
            engine.tune()
        assert engine.tune(batch=1, most_trials=1).best is not None


def test_an_engine_for_a_few_tokens_is_refused() -> None:
    said = "max_model_len: got 15; allowed: at least 16"
    with new_engine(**OPEN | {"max_model_len": 15}) as engine, pytest.raises(InvalidOption, match=said):
        engine.tune()


def test_requests_are_in_the_way_and_lose_nothing(engine: Engine) -> None:
    expected = tokens(engine)[0]
    number = engine.submit(list(prompt(150)), max_new_tokens=24, seed=0)
    found = [*engine.step(), *engine.step()]
    with pytest.raises(InvalidOption, match=r"1 requests that wait or run.*Run them to their ends, or cancel them"):
        engine.tune()
    while engine.has_unfinished:
        found += engine.step()
    assert [token for output in found if output.request_id == number for token in output.new_token_ids] == expected


def test_a_trace_is_in_the_way(engine: Engine, tmp_path: Path) -> None:
    with engine.trace(tmp_path / "log"), pytest.raises(InvalidOption, match="Leave the trace first"):
        engine.tune()


def test_there_must_be_something_to_choose() -> None:
    given: dict[str, Any] = {"chunk_tokens": 16, "group_chunks": 2, "staging_slots": 2}
    with new_engine(**SMALL | given, drafting="sequential") as engine:
        with pytest.raises(InvalidOption, match=r'at least one of chunk_tokens, .*, lookahead_branches left at "auto"'):
            engine.tune()
        assert tokens(engine)
    said, given = "at least one of chunk_tokens, group_chunks, staging_slots left at", given | {"drafting": "off"}
    with make_engine(model("qwen3"), **SMALL | given) as alone, pytest.raises(InvalidOption, match=said):
        alone.tune()


def test_a_closed_engine_is_not_tuned(engine: Engine) -> None:
    engine.close()
    with pytest.raises(EngineClosed):
        engine.tune()


def test_an_interrupt_leaves_what_was_measured_before(engine: Engine) -> None:
    expected, told = tokens(engine), list[Trial]()

    def third(trial: Trial) -> None:
        told.append(trial)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.tune(told=third)
    best = best_trial(told)
    assert best is not None
    assert settings_of(engine) == best.settings
    assert tokens(engine) == expected
    with new_engine(**OPEN) as other:
        assert settings_of(other) == best.settings, "stored"


def test_an_interrupt_in_a_trial(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, step, steps = tokens(engine), Engine.step, list[Engine]()

    def interrupted(self: Engine) -> Any:
        steps.append(self)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.tune()
    assert steps[-1] is not engine
    assert steps[-1]._closed
    assert tokens(engine) == expected


def test_a_callback_cannot_use_the_engine(engine: Engine) -> None:
    with pytest.raises(EngineBusy):
        engine.tune(told=lambda trial: tokens(engine) and None)
    assert tokens(engine)


def test_a_trial_that_fails_is_one_of_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Stopwatch.rate

    def failing(self: Stopwatch, settings: TunedSettings, best: float) -> float:
        if settings.num_speculative_tokens == 2:
            raise torch.OutOfMemoryError("no room")
        return rate(self, settings, best)

    monkeypatch.setattr(Stopwatch, "rate", failing)
    found = engine.tune(most_trials=6)
    failed = [trial for trial in found.trials if trial.tokens_per_second is None]
    assert failed
    assert {(trial.settings.num_speculative_tokens, trial.error) for trial in failed} == {(2, "no room")}
    assert found.best not in failed
    assert ": no room" in str(found)


def test_an_engine_that_cannot_be_made_again_is_closed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*_: object) -> Any:
        raise OutOfBudget("nothing is left")

    monkeypatch.setattr("specstream.engine.make_parts", nothing_fits)
    with pytest.raises(OutOfBudget, match="nothing is left"):
        engine.tune(most_trials=1)
    with pytest.raises(EngineClosed):
        engine.submit([1, 2, 3])
    engine.close()


def test_memory_is_given_back_before_trials(engine: Engine) -> None:
    before = engine.parts
    engine.tune(most_trials=1)
    assert before.executor.store.total_bytes == 0
    assert engine.parts is not before


def test_what_cannot_be_stored_is_used_by_this_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(SpecStreamWarning, match="what was tuned cannot be stored .* only used by this engine"):
        found = engine.tune(most_trials=3)
    assert found.file is None
    assert found.best is not None
    assert settings_of(engine) == found.best.settings


def test_what_does_not_fit_any_more_is_not_used(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.tune(most_trials=1)
    file = tuned_file(engine.parts.requested, engine.parts.target, engine.parts.draft)
    file.write_text(file.read_text().replace('"staging_slots": ', '"staging_slots": 90'))
    with pytest.warns(SpecStreamWarning, match="do not fit now, automatic ones are used"):
        other = new_engine(**OPEN)
    with other:
        assert tokens(other)


def test_a_damaged_file_is_said_and_passed_over(engine: Engine) -> None:
    file = engine.tune(most_trials=1).file
    assert file is not None
    file.write_text("{")
    with pytest.warns(SpecStreamWarning, match="holds no tuned settings"), new_engine(**OPEN) as other:
        assert tokens(other)


def test_trials_are_in_tensorboards_hparams(engine: Engine, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    found = engine.tune(most_trials=3, logdir=tmp_path / "log")
    (folder,) = (tmp_path / "log").iterdir()
    assert not list(folder.glob("events*")), "an experiment without columns would hide the settings"
    for number, trial in enumerate(found.trials):
        run = accumulators.EventAccumulator(str(folder / f"trial-{number:02d}"))
        run.Reload()
        started = metadata.parse_session_start_info_plugin_data(
            run.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
        )
        assert started.hparams["drafting"].string_value == trial.settings.drafting
        assert started.hparams["chunk_tokens"].number_value == trial.settings.chunk_tokens
        assert trial.tokens_per_second is not None
        assert run.Tags()["scalars"] == list(trial.figures)
        assert run.Scalars("tokens_per_second")[0].value == pytest.approx(trial.tokens_per_second)
