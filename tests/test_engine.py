"""The engine as its caller sees it: requests, rounds, errors, limits, results, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from specstream.engine import Engine
from specstream.errors import EngineClosed, InvalidOption, OutOfBudget
from specstream.kv import HostStore
from specstream.options import Options
from specstream.outputs import StepOutput
from specstream.sequence import FinishReason
from tests.helpers import (
    OPTIONS,
    Request,
    best,
    check_free,
    cpu_executor,
    make_engine,
    model,
    new_engine,
    prompt,
    serve,
    step_to_end,
)

# Requests


def test_requests_join_and_leave_between_rounds() -> None:
    requests = [Request(prompt(5 + 3 * i), 6 + 4 * (i % 3), joins=2 * i) for i in range(6)]
    requests[1].leaves = 2
    with new_engine() as engine:
        serve(engine, requests)
    for request in requests:
        assert request.output is not None
        if request.leaves is None:
            assert request.tokens == best(request.prompt, request.max_new_tokens)
            assert request.output.finish_reason == "length"
        else:
            assert request.tokens == best(request.prompt, len(request.tokens))
            assert request.output.finish_reason == "cancelled"
    assert requests[1].output is not None


def test_cancel_of_waiting_running_and_unknown_requests() -> None:
    with new_engine(max_num_seqs=1) as engine:
        running, waiting = (engine.submit(prompt(9, i), max_new_tokens=12) for i in range(2))
        (first,) = engine.step()
        assert (first.request_id, first.finished, first.finish_reason) == (running, False, None)
        gone = engine.cancel(waiting)
        assert gone is not None
        assert (gone.token_ids, gone.finish_reason) == ([], FinishReason.CANCELLED)
        gone = engine.cancel(running)
        assert gone is not None
        assert (gone.request_id, gone.token_ids) == (running, best(prompt(9), 1))
        assert engine.cancel(running) is None
        assert engine.cancel(99) is None
        assert not engine.has_unfinished
        assert engine.step() == []
        check_free(engine)


def test_ids_are_never_used_twice() -> None:
    with new_engine() as engine:
        ids = []
        for _ in range(3):
            ids.append(engine.submit(prompt(4), max_new_tokens=2))
            step_to_end(engine)
        assert len(set(ids)) == 3


def test_reset_cancels_everything_and_zeroes_the_counters() -> None:
    with new_engine() as engine:
        blank = engine.metrics()
        for i in range(5):
            engine.submit(prompt(9, i), max_new_tokens=12)
        engine.step()
        engine.run_round()  # its outputs wait for a step
        assert engine.metrics() != blank
        engine.reset()
        assert engine.metrics() == blank
        assert not engine.has_unfinished
        check_free(engine)
        assert engine.generate([list(prompt(9))], max_new_tokens=8).tolist() == [[*prompt(9), *best(prompt(9), 8)]]  # type: ignore[union-attr]


def test_a_closed_engine_refuses_everything_and_closes_twice() -> None:
    engine = new_engine()
    engine.submit(prompt(9), max_new_tokens=12)
    engine.step()
    engine.close()
    engine.close()
    text = "the engine is closed; make a new one with specstream.compile"
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.submit(prompt(3), max_new_tokens=1),
        engine.step,
        engine.reset,
        lambda: engine.cancel(0),
        lambda: engine.generate([[1]], max_new_tokens=1),
    )
    for call in calls:
        with pytest.raises(EngineClosed) as error:
            call()
        assert str(error.value) == text
    assert engine._host.extents == []


# Rounds of several callers


def test_generate_keeps_the_outputs_of_other_requests() -> None:
    with new_engine() as engine:
        other = engine.submit(prompt(9), max_new_tokens=20)
        seen = [token for output in engine.step() for token in output.new_token_ids]
        out = engine.generate([list(prompt(5))], max_new_tokens=20)
        assert isinstance(out, Tensor)
        assert out[0, 5:].tolist() == best(prompt(5), 20)
        assert engine.has_unfinished
        rest = step_to_end(engine)
        assert seen + rest[other] == best(prompt(9), 20)
        check_free(engine)


def test_outputs_kept_for_others_survive_a_failing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine() as engine:
        other = engine.submit(prompt(9), max_new_tokens=20)
        engine.generate([list(prompt(5))], max_new_tokens=6)
        with monkeypatch.context() as patch:
            patch.setattr(engine._executor, "run", failing(Fault("run")))
            with pytest.raises(Fault):
                engine.step()
        assert step_to_end(engine)[other] == best(prompt(9), 20)


# Errors in a round


class Fault(Exception):
    """An injected error."""


def failing(error: BaseException, after: int = 0, work: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that works `after` times, then fails once, then works."""
    calls = 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise error
        return work(*arguments, **keywords) if work else None

    return call


def inject(where: str, error: BaseException, after: int, engine: Engine, patch: pytest.MonkeyPatch) -> None:
    executor, drafter = cpu_executor(engine), engine._speculator.drafter
    assert drafter is not None
    if where in ("fetch", "offload"):
        ring = executor.store.ring.untyped_storage().data_ptr()
        failing_copy = failing(error, after, executor._copy)
        plain_copy = executor._copy

        def copy(destination: Tensor, source: Tensor) -> None:
            fetch = destination.untyped_storage().data_ptr() == ring
            (failing_copy if fetch == (where == "fetch") else plain_copy)(destination, source)

        patch.setattr(executor, "_copy", copy)
    elif where == "piece":
        work = executor._work
        patch.setattr(executor, "_work", failing(error, after, work))
    elif where == "append":
        attention = executor._attention
        patch.setattr(attention, "append", failing(error, after, attention.append))
    elif where == "draft start":
        patch.setattr(drafter, "start", failing(error, after, drafter.start))
    elif where == "draft":
        patch.setattr(drafter, "_attend", failing(error, after, drafter._attend))
    elif where == "accept":
        speculator = engine._speculator  # all of it: an error of one request alone is noted, see test_request_errors
        patch.setattr(speculator, "accept", failing(error, after, speculator.accept))
    elif where == "plan":
        planner = engine._planner
        patch.setattr(planner, "plan", failing(error, after, planner.plan))
    else:
        raise AssertionError(where)


PLACES = ("fetch", "offload", "piece", "append", "draft start", "draft", "accept", "plan")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_failed_step_can_be_tried_again(
    where: str, error: type[BaseException], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_engine(gpu_kv_budget="32KiB", max_num_batched_tokens=7) as engine:
        inject(where, error("injected"), after, engine, monkeypatch)
        wanted = {engine.submit(prompt(length), max_new_tokens=20): prompt(length) for length in (13, 18)}
        tokens: dict[int, list[int]] = {number: [] for number in wanted}
        failures = 0
        while engine.has_unfinished:
            before = {s.request_id: (list(s.tokens), s.kv and s.kv.length) for s in engine._scheduler.running}
            try:
                outputs = engine.step()
            except error:
                failures += 1
                for sequence in engine._scheduler.running:  # none has moved
                    if sequence.request_id in before:
                        assert before[sequence.request_id] == (sequence.tokens, sequence.kv and sequence.kv.length)
                outputs = []
            for output in outputs:
                tokens[output.request_id] += output.new_token_ids
        assert failures <= 1
        assert failures == 1 or after > 0 or where == "fetch"  # one fetched ahead is fetched again if it failed
        for number, ids in wanted.items():
            assert tokens[number] == best(ids, 20)
        check_free(engine)


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_an_interrupted_generate_frees_its_requests_and_no_others(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_engine() as engine:
        other = engine.submit(prompt(9), max_new_tokens=20)
        inject("accept", error("injected"), 5, engine, monkeypatch)
        with pytest.raises(error, match="injected"):
            engine.generate([list(prompt(5)), list(prompt(6))], max_new_tokens=20)
        assert engine.has_unfinished
        assert [s.request_id for s in engine._scheduler.running] == [other]
        assert not engine._scheduler.waiting
        assert step_to_end(engine)[other] == best(prompt(9), 20)
        check_free(engine)


def test_a_streamer_that_fails_ends_its_request() -> None:
    class Bad:
        def put(self, value: Tensor) -> None:
            if value.numel() == 1:
                raise Fault("streamer")

        def end(self) -> None:
            """Never called."""

    with new_engine() as engine:
        with pytest.raises(Fault):
            engine.generate([list(prompt(5))], max_new_tokens=9, streamer=Bad())
        assert not engine.has_unfinished
        check_free(engine)


# What is refused, and how


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": []}, "prompt: got []; allowed: at least one token. Start from the model's first special token."),
        ({"prompt": [1, 96]}, "prompt: got 96; allowed: token ids from 0 to 95."),
        ({"prompt": [-1]}, "prompt: got -1; allowed: token ids from 0 to 95."),
        ({"prompt": [True]}, "prompt: got True; allowed: token ids from 0 to 95."),
        ({"prompt": [1.0]}, "prompt: got 1.0; allowed: token ids from 0 to 95."),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; allowed: an integer from 1."),
        ({"max_new_tokens": 2.0}, "max_new_tokens: got 2.0; allowed: an integer from 1."),
        (
            {"prompt": [1] * 64},
            "prompt: got '64 tokens'; allowed: at most 63 tokens, since max_model_len is 64 and output needs room. "
            "Shorten the prompt or compile with a larger max_model_len.",
        ),
    ],
)
def test_requests_that_submit_refuses(arguments: dict[str, Any], text: str) -> None:
    with new_engine() as engine:
        with pytest.raises(InvalidOption) as error:
            engine.submit(**dict[str, Any](prompt=[1, 2], max_new_tokens=4) | arguments)
        assert str(error.value) == text
        assert not engine.has_unfinished


def test_options_that_are_refused() -> None:
    with pytest.raises(InvalidOption, match=r"^num_candidates: got 3; allowed: no such option; the options"):
        new_engine(num_candidates=3)
    for name, value, allowed in (
        ("num_speculative_tokens", 0, 'an integer from 1 to 128 or "auto"'),
        ("num_speculative_tokens", True, 'an integer from 1 to 128 or "auto"'),
        ("chunk_tokens", 1.5, 'an integer from 1 to 1048576 or "auto"'),
        ("max_num_seqs", 0, "an integer from 1 to 4096"),
        ("staging_slots", -1, 'an integer from 1 to 1024 or "auto"'),
        ("draft_window", 0, 'a positive integer, "auto", or None (keep everything)'),
        ("draft_sink", -1, "an integer from 0"),
        ("gpu_kv_budget", "4 GiBs", 'a positive number of bytes or text such as "4GiB", or "auto" or "min"'),
        ("host_kv_budget", 0, 'a positive number of bytes or text such as "4GiB", or "auto"'),
        ("debug", 1, "True or False"),
    ):
        with pytest.raises(InvalidOption) as error:
            Options.from_keywords(**{name: value})
        assert str(error.value) == f"{name}: got {value!r}; allowed: {allowed}."


# Limits


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_max_new_tokens_is_exact(depth: int) -> None:
    with new_engine(num_speculative_tokens=depth, gpu_kv_budget="min") as engine:
        for count in range(1, 14):
            request = Request(prompt(10), count)
            serve(engine, [request])
            assert request.output is not None
            assert request.tokens == best(prompt(10), count)
            assert request.output.finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_max_model_len_is_exact_at_every_offset(depth: int) -> None:
    for limit in range(20, 29):  # two chunks of four, and one more
        with new_engine(num_speculative_tokens=depth, max_model_len=limit, gpu_kv_budget="min") as engine:
            requests = [Request(prompt(length), 99) for length in (limit - 1, limit - 2, 9)]
            serve(engine, requests)
            for request in requests:
                assert request.output is not None
                assert request.tokens == best(request.prompt, limit - len(request.prompt))
                assert request.output.finish_reason == "length"


def test_metrics_are_what_vllm_defines() -> None:
    with new_engine(num_speculative_tokens=3) as engine:
        engine.generate([list(prompt(9))], max_new_tokens=14)
        metrics = engine.metrics()
        # 1 with the prompt, then 4 + 4 + 4, then 1 of the target's own.
        assert metrics.generated_tokens == 14
        assert metrics.num_rounds == 5
        assert metrics.num_verify_rounds == 4
        assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (9, 9)
        assert metrics.accepted_per_position == (3, 3, 3)
        assert metrics.acceptance_per_position == (3 / 4, 3 / 4, 3 / 4)
        assert metrics.mean_acceptance_length == 1 + 9 / 4
        assert metrics.draft_acceptance_rate == 1.0
        assert metrics.decode_tokens == 13
        assert metrics.tokens_per_second == 13 / metrics.decode_seconds
        memory = engine.memory
        assert metrics.device_kv_bytes == memory.device_kv
        assert memory.device_kv + memory.prompt_buffer == engine._executor.store.total_bytes
        assert metrics.full_kv_bytes == 6 * engine.memory.layout.chunk_bytes
    with make_engine(model("qwen3"), **OPTIONS) as engine:
        engine.generate([list(prompt(9))], max_new_tokens=5)
        metrics = engine.metrics()
        assert (metrics.num_draft_tokens, metrics.draft_acceptance_rate, metrics.mean_acceptance_length) == (0, 0, 1)
        assert metrics.num_verify_rounds == 4


def test_step_outputs_say_when_a_request_has_finished() -> None:
    with new_engine() as engine:
        number = engine.submit(prompt(9), max_new_tokens=6)
        steps: list[StepOutput] = []
        while engine.has_unfinished:
            steps += engine.step()
        assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
        assert steps[-1].finish_reason is FinishReason.LENGTH
        assert {step.request_id for step in steps} == {number}


def test_host_memory_that_is_refused_costs_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_engine() as engine:
        running = engine.submit(prompt(9), max_new_tokens=9)
        tokens = [token for output in engine.step() for token in output.new_token_ids]
        with monkeypatch.context() as patch:
            patch.setattr(HostStore, "reserve", failing(OutOfBudget("no"), 0, HostStore.reserve))
            engine.submit(prompt(40), max_new_tokens=9)
            with pytest.raises(OutOfBudget):
                engine.step()
        assert running in [sequence.request_id for sequence in engine._scheduler.running]
        later = step_to_end(engine)
        assert tokens + later[running] == best(prompt(9), 9)
        check_free(engine)
