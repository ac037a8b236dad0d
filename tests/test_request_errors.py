"""An error of one request, such as one its own processors raise, ends that request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specstream.engine import Engine
from specstream.errors import InvalidDistribution
from specstream.outputs import StepOutput
from specstream.speculate import Speculation
from tests.helpers import best, check_free, new_engine, prompt

COUNT = 12


class OwnError(Exception):
    """Of the caller's."""


class FailAt:
    """A processor and a stopping criterion that fails once the text has some length."""

    def __init__(self, length: int, error: BaseException) -> None:
        self.length, self.error = length, error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        if input_ids.shape[1] >= self.length:
            raise self.error
        return torch.tensor([False]) if scores is None else scores


def fail_in(where: str, length: int, error: BaseException) -> dict[str, Any]:
    return {where: [FailAt(length, error)]}


def collect(engine: Engine, errors: list[Exception]) -> dict[int, list[StepOutput]]:
    """Steps to the end; errors are kept and the steps go on."""
    outputs: dict[int, list[StepOutput]] = {}
    while engine.has_unfinished:
        try:
            steps = engine.step()
        except OwnError as error:
            errors.append(error)
            continue
        for output in steps:
            assert output.error is None
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("produced", [0, 1, 5])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_others_go_on(where: str, produced: int, place: int) -> None:
    """Wherever it stands among them; `step` raises it once, and gives what the others produced in that round."""
    prompts = [prompt(length) for length in (9, 14, 5)]
    error = OwnError("odd")
    with new_engine(gpu_kv_budget="64KiB") as engine:
        for index, ids in enumerate(prompts):
            extra = int(where == "stopping_criteria")  # it sees the new token too
            own = fail_in(where, len(ids) + produced + extra, error) if index == place else {}
            engine.submit(ids, max_new_tokens=COUNT, **own)
        errors: list[Exception] = []
        outputs = collect(engine, errors)
        check_free(engine)
        assert engine.metrics().generated_tokens == sum(len(tokens_of(each)) for each in outputs.values())
    assert errors == [error]
    assert getattr(error, "__notes__") == [f"raised while the tokens of request {place} were chosen"]  # noqa: B009
    for index, ids in enumerate(prompts):
        last = outputs[index][-1].output
        assert last is not None
        assert last.token_ids == tokens_of(outputs[index])
        if index != place:
            assert (last.token_ids, last.finish_reason) == (best(ids, COUNT), "length")
        else:
            assert last.finish_reason == "cancelled"
            assert last.token_ids == best(ids, len(last.token_ids))
            assert len(last.token_ids) <= produced


def test_two_that_fail_in_one_round_are_raised_one_by_one() -> None:
    with new_engine() as engine:
        errors = [OwnError("a"), OwnError("b")]
        for index, error in enumerate(errors):
            engine.submit(prompt(9, index), max_new_tokens=4, **fail_in("logits_processor", 0, error))
        engine.submit(prompt(5), max_new_tokens=COUNT)
        seen: list[Exception] = []
        outputs = collect(engine, seen)
        check_free(engine)
    assert seen == errors
    assert tokens_of(outputs[2]) == best(prompt(5), COUNT)
    assert [output.finish_reason for index in (0, 1) for output in outputs[index]] == ["cancelled"] * 2


def test_the_last_request_that_fails_is_still_to_be_read() -> None:
    with new_engine() as engine:
        number = engine.submit(prompt(9), max_new_tokens=4, **fail_in("logits_processor", 0, OwnError("odd")))
        engine.generate([list(prompt(5))], max_new_tokens=COUNT)  # its rounds are not the place to raise it
        assert engine.cancel(number) is None
        check_free(engine)
        assert engine.has_unfinished
        with pytest.raises(OwnError):
            engine.step()
        (output,) = engine.step()
        assert (output.request_id, output.finish_reason) == (number, "cancelled")
        assert not engine.has_unfinished


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_generate_raises_its_own_and_leaves_the_others(where: str) -> None:
    error = OwnError("odd")
    with new_engine() as engine:
        other = engine.submit(prompt(9), max_new_tokens=COUNT)
        failing = fail_in(where, 8, error)
        with pytest.raises(OwnError) as raised:
            engine.generate([list(prompt(5)), list(prompt(6))], max_new_tokens=COUNT, **failing)
        assert raised.value is error
        assert engine.has_unfinished
        assert [s.request_id for s in engine._unfinished()] == [other]
        assert tokens_of(collect(engine, [])[other]) == best(prompt(9), COUNT)
        check_free(engine)


def test_a_stream_raises_its_own_whoever_runs_the_round() -> None:
    with new_engine() as engine:
        bad = engine.stream([list(prompt(5))], max_new_tokens=COUNT, **fail_in("logits_processor", 6, OwnError("odd")))
        good = engine.stream([list(prompt(9))], max_new_tokens=COUNT)
        assert next(bad).token_ids == best(prompt(5), 1)
        assert [token for piece in good for token in piece.token_ids] == best(prompt(9), COUNT)
        with pytest.raises(OwnError):
            next(bad)
        assert not engine.has_unfinished
        check_free(engine)


def test_no_distribution_ends_one_request() -> None:
    with new_engine() as engine:
        bad = engine.stream([list(prompt(5))], max_new_tokens=4, do_sample=True, temperature=1e-40, seed=0)
        number = engine.submit(prompt(9), max_new_tokens=COUNT)
        with pytest.raises(InvalidDistribution, match="position 5"):
            next(bad)
        assert tokens_of(collect(engine, [])[number]) == best(prompt(9), COUNT)
        check_free(engine)


def fails_for(request: int, work: Callable[..., Any], seeds: list[int]) -> Callable[..., Any]:
    """`Speculation`'s method for one seed, which stands for a request."""

    def call(self: Speculation, sampling: Any, *arguments: Any) -> Any:
        if sampling.seed == seeds[request]:
            raise OwnError("odd")
        return work(self, sampling, *arguments)

    return call


@pytest.mark.parametrize("method", ["accept", "propose"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_while_drafting_too(method: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [11, 12, 13]
    monkeypatch.setattr(Speculation, method, fails_for(place, getattr(Speculation, method), seeds))
    with new_engine() as engine:
        for index, seed in enumerate(seeds):
            engine.submit(prompt(9, index), max_new_tokens=COUNT, seed=seed)
        errors: list[Exception] = []
        outputs = collect(engine, errors)
        check_free(engine)
    assert [str(error) for error in errors] == ["odd"]
    for index in range(3):
        wanted = [] if index == place else best(prompt(9, index), COUNT)
        assert tokens_of(outputs[index]) == wanted


def test_an_interrupt_is_of_the_round_and_not_of_the_request() -> None:
    interrupt = KeyboardInterrupt()
    with new_engine() as engine:
        processor = FailAt(0, interrupt)
        engine.submit(prompt(9), max_new_tokens=COUNT)
        engine.submit(prompt(5), max_new_tokens=COUNT, logits_processor=[processor])
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert [len(s.new_tokens) for s in engine._scheduler.running] == [0, 0]
        processor.length = 999
        outputs = collect(engine, [])
        assert [tokens_of(outputs[i]) for i in (0, 1)] == [best(prompt(9), COUNT), best(prompt(5), COUNT)]
        check_free(engine)
