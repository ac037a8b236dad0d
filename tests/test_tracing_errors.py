"""Recording an engine while something fails: a round, a request, a copy, the disk; or Ctrl-C strikes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specstream.errors import SpecStreamWarning
from specstream.traces.records import RecordedRound
from specstream.traces.run_writer import RunWriter
from tests.helpers import best, make_engine, model, new_engine, prompt, step_to_end
from tests.test_tracing import check, check_count, check_spans, wait_for_copies
from tests.trace_cases import on_disk


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_closes_the_files_and_the_engine_goes_on(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_engine() as engine:
        request = engine.submit(prompt(14), max_new_tokens=12)
        steps, draft = 0, engine._speculator.draft

        def fail(step: int) -> None:
            raise error("struck")

        def three_rounds_and_a_failure() -> None:
            with engine.trace(tmp_path, run="struck"):
                for _ in range(3):
                    engine.step()
                monkeypatch.setattr(engine._speculator, "draft", fail)
                engine.step()

        with pytest.raises(error, match="struck"):
            three_rounds_and_a_failure()
        assert engine.recorder is None
        check_count(tmp_path / "struck", 3)
        monkeypatch.setattr(engine._speculator, "draft", draft)
        with engine.trace(tmp_path) as second:
            while engine.has_unfinished:
                for out in engine.step():
                    last = out
                steps += 1
        assert last.request_id == request
        assert last.output is not None
        assert last.output.token_ids == best(prompt(14), 12)
        check_count(second, steps)


def test_a_round_that_is_tried_again_is_recorded_once(tmp_path: Path) -> None:
    failing = [True]

    def copy(destination: Tensor, source: Tensor) -> None:
        if failing:
            failing.clear()
            raise OSError("the link is down")
        destination.copy_(source)

    with make_engine(model("qwen3"), copy=copy, chunk_tokens=4, max_model_len=64, gpu_kv_budget="min") as engine:
        with engine.trace(tmp_path) as run:
            engine.submit(prompt(20), max_new_tokens=5)
            with pytest.raises(OSError, match="the link is down"):
                step_to_end(engine)
            step_to_end(engine)
            wait_for_copies(engine)
        found = on_disk(run)
        assert not failing
        assert len(found.rounds) == engine.metrics().num_rounds
        for recorded in found.rounds.values():
            check_spans(recorded, found)


@pytest.mark.parametrize("strike", [KeyboardInterrupt, OSError])
def test_what_goes_wrong_while_a_round_is_written(
    strike: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = RunWriter.add, 0

    def failing(self: RunWriter, recorded: RecordedRound) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise strike("no space left")
        add(self, recorded)

    monkeypatch.setattr(RunWriter, "add", failing)
    tokens: list[int] = []
    interrupts = 0
    with new_engine() as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with engine.trace(tmp_path) as run:
            engine.submit(prompt(14), max_new_tokens=12)
            while engine.has_unfinished:
                try:
                    tokens += [token for out in engine.step() for token in out.new_token_ids]
                except KeyboardInterrupt:
                    interrupts += 1
        assert tokens == best(prompt(14), 12)
        told = [str(each.message) for each in caught if issubclass(each.category, SpecStreamWarning)]
        if strike is OSError:
            assert len(told) == 1
            assert "ends early" in told[0]
            check_count(run, 2)
        else:
            assert interrupts == 1
            assert not told
            check_count(run, engine.metrics().num_rounds)


def test_a_request_that_fails_counts_for_nothing(tmp_path: Path) -> None:
    def criterion(ids: Tensor, scores: Any, **_: Any) -> bool:
        if ids.shape[1] > 12:
            raise ZeroDivisionError
        return False

    with new_engine() as engine:
        with engine.trace(tmp_path) as run:
            engine.submit(prompt(9), max_new_tokens=20, stopping_criteria=[criterion])
            engine.submit(prompt(14), max_new_tokens=12)
            with pytest.raises(ZeroDivisionError):
                step_to_end(engine)
            step_to_end(engine)
            wait_for_copies(engine)
        check(on_disk(run), engine.metrics())
