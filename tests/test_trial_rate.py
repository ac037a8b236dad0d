"""The rate of a trial: chance does not decide between settings."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from specstream.depth import expected_tokens
from specstream.engine import Engine
from specstream.fan_out import SECOND_MODEL, expected_hit_rate
from specstream.metrics import Metrics
from specstream.options import Options
from specstream.parts import make_parts
from specstream.trial import BLOCKS, ROUNDS, WARMUP, Stopwatch, chance_of_acceptance
from specstream.trial_rate import TrialRound, rate_of, seconds_longer
from specstream.tuned_settings import TunedSettings
from specstream.workload import Workload
from tests.helpers import captured, model, prompt
from tests.test_lookahead import near

OPTIONS = Options(
    max_model_len=256, gpu_kv_budget="200KiB", num_speculative_tokens="auto", drafting="lookahead", max_num_seqs=1
)


def never() -> float:
    raise AssertionError("both kinds of rounds were measured")


def test_the_middle_block_counts() -> None:
    blocks = [[TrialRound(1.0, 6.0), TrialRound(2.0, 6.0)], [TrialRound(50.0, 1.0)], [TrialRound(1.0, 1.0)]]
    assert rate_of(blocks) == 1.0
    assert rate_of(blocks[:1]) == 4.0


def test_as_many_rounds_count_as_missed_as_are_expected() -> None:
    """Rounds of 2 seconds, or 3 if they were missed, of which a quarter is expected: 2.25 on average."""
    generator = random.Random(0)
    for _ in range(200):
        was_missed = [[generator.random() < 0.25 for _ in range(6)] for _ in range(3)]
        blocks = [[TrialRound(2.0 + each, 4.5, each) for each in block] for block in was_missed]
        every = [each for block in was_missed for each in block]
        late = never if any(every) and not all(every) else lambda: 1.0
        assert rate_of(blocks, 0.25, late) == pytest.approx(2.0)
        if any(every):
            assert rate_of(blocks) <= 4.5 / 2.0
    assert rate_of([[TrialRound(2.0, 4.5, False)] * 3 + [TrialRound(3.0, 4.5, True)] * 3]) == pytest.approx(1.8)


def test_what_was_not_measured_is_predicted() -> None:
    rounds = [TrialRound(2.0, 1.0), TrialRound(4.0, 1.0)]
    assert seconds_longer(rounds, lambda: 7.0) == 7.0
    assert seconds_longer([TrialRound(9.0, 1.0, True)], lambda: 7.0) == 7.0
    assert seconds_longer([*rounds, TrialRound(9.0, 1.0, True)], never) == 6.0
    assert rate_of([[TrialRound(2.0, 1.0)]], 0.5, lambda: 4.0) == 1 / 4
    assert rate_of([[TrialRound(6.0, 1.0, True)]], 0.5, lambda: 4.0) == 1 / 4


def test_drafting_that_follows_a_round_has_occurred_twice_before_rounds_are_measured() -> None:
    """So it is replayed. Rounds of which nothing was proposed are none of which the acceptance of texts is reckoned."""
    found = list[Metrics]()
    target, draft = captured(model("qwen3")), captured(near())
    prompts = [list(prompt(200))]
    for given in (None, prompts):
        stopwatch = Stopwatch(OPTIONS, target, draft, Workload(256, 1, 0.9), prompts=given)
        settings = TunedSettings(16, 2, 2, 2, "lookahead", 6)
        with Engine(make_parts(settings.given_to(stopwatch.options), target, draft)) as engine:
            stopwatch._start(engine, 2)
            found.append(engine.metrics())
    for metrics, rounds in zip(found, (2, 1), strict=True):
        assert metrics.num_verify_rounds == WARMUP
        assert metrics.num_drafts == WARMUP - rounds
    chance = chance_of_acceptance(
        replace(found[0], num_drafts=4, num_accepted_tokens=8, accepted_per_position=(4, 4)), 2
    )
    assert chance == 1.0
    assert (
        chance_of_acceptance(replace(found[0], num_drafts=0, num_accepted_tokens=0, accepted_per_position=()), 2)
        is None
    )


def test_all_numbers_of_candidates_stream_histories_of_one_length() -> None:
    """Near the end of the context, where requests seldom come to it within a trial."""
    for prompts in (None, [list(prompt(8192))]):
        workload = Workload(8192, 1, 0.8)
        stopwatch = Stopwatch(OPTIONS, captured(model("qwen3")), captured(near()), workload, prompts=prompts)
        (room,) = {stopwatch._room(depth) for depth in (0, 2, 8, 32)}
        most = (WARMUP + BLOCKS * ROUNDS + 1) * 33
        assert room == most if prompts else (WARMUP + BLOCKS * ROUNDS) * expected_tokens(0.8, 32) < room < most / 3
        assert stopwatch._room(128) > room
    stopwatch = Stopwatch(OPTIONS, captured(model("qwen3")), captured(near()), Workload(256, 1, 0.8))
    assert stopwatch._room(8) == 128


def missed(engine: Engine) -> int:
    metrics = engine.metrics()
    return metrics.num_outcomes - metrics.num_foreseen_outcomes


class LateClock:
    """Rounds take a second, and another half if the outcome was not foreseen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.rounds, step = 0.0, 0, Engine.step

        def timed(engine: Engine) -> Any:
            before = missed(engine)
            outputs = step(engine)
            self.rounds += 1
            self.seconds += 1.5 if missed(engine) > before else 1.0
            return outputs

        monkeypatch.setattr(Engine, "step", timed)

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(("batch", "acceptance"), [(1, 0.6), (2, 0.8)])
def test_lookahead_is_measured_as_if_it_had_missed_as_often_as_is_expected(
    batch: int, acceptance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, depth = LateClock(monkeypatch), 3
    options = replace(OPTIONS, max_num_seqs=2)
    target, draft = captured(model("qwen3")), captured(near())
    stopwatch = Stopwatch(options, target, draft, Workload(256, batch, acceptance), clock=clock)
    missing = 1 - expected_hit_rate(acceptance, depth, replace(SECOND_MODEL, branches=6 // batch)) ** batch
    assert 0.1 < missing < 0.9
    rate = stopwatch.rate(TunedSettings(16, 2, 2, depth, "lookahead", 6), 0.0)
    assert rate == pytest.approx(batch * expected_tokens(acceptance, depth) / (1 + missing / 2))
    assert clock.rounds > BLOCKS * ROUNDS
