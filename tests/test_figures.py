"""Figures of runs, rounds and layers: of rounds worked out by hand, and against the engine's own counters."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from specstream.scheduler import RequestRows
from specstream.traces.figures import (
    measured_figures,
    measured_layers,
    planned_figures,
    planned_layers,
    run_figures,
)
from specstream.traces.records import MeasuredSpan, PlannedTask, RecordedRound, RequestRound, RoundSummary
from specstream.traces.waits import exposed_draft, measured_drafting, measured_waits, planned_drafting, planned_waits
from tests.helpers import make_engine, model, prompt
from tests.run_folders import FETCH_US, GROUP_BYTES, planned_round, recorded_round, run_info

PLAN = planned_round(layers=3, groups=4, draft_us=20.0)
# 12 fetches of 10 us; the last attend takes 5 us more, accept 3, and the two draft steps 40.
PERIOD_US = 12 * FETCH_US + 5 + 3 + 40


def test_a_planned_round() -> None:
    figures = planned_figures(PLAN, run_info())
    assert figures.duration_us == PLAN.period_us == PERIOD_US
    assert figures.link_floor_us == 120
    assert figures.over_link_floor == pytest.approx(PERIOD_US / 120)
    assert figures.link_utilization == pytest.approx(120 / PERIOD_US)
    assert figures.busy_us == {"target": 5 + 60 + 3, "link": 120, "store": 0, "draft": 40}
    # What the target does and its bubbles are the whole period.
    assert figures.bubbles_us == PERIOD_US - 68
    assert (figures.draft_us, figures.exposed_draft_us, figures.bubble_fill) == (40, 40, 0)


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_a_measured_round_is_the_planned_one_stretched(slower: float) -> None:
    planned = planned_figures(PLAN, run_info())
    measured = measured_figures(recorded_round(PLAN, 1, slower), PLAN, run_info())
    assert measured.duration_us == pytest.approx(slower * planned.duration_us)
    assert measured.busy_us == pytest.approx({k: slower * us for k, us in (planned.busy_us or {}).items()})
    assert measured.bubbles_us == pytest.approx(slower * (planned.bubbles_us or 0))
    assert measured.exposed_draft_us == pytest.approx(slower * (planned.exposed_draft_us or 0))
    assert measured.hidden_draft_us == pytest.approx(0, abs=1e-9)
    assert measured.link_utilization == pytest.approx((planned.link_utilization or 0) / slower)


def test_draft_steps_beside_a_target_that_waits_for_the_link_are_hidden() -> None:
    """The same round, with drafting moved to where the target waits for the link: 5 us of every 10."""
    spans = [s for s in recorded_round(PLAN, 1, 1.0).spans if not s.task.startswith("draft/")]
    beside = [MeasuredSpan("draft/0", 40, 45), MeasuredSpan("draft/1", 45, 55)]
    last = max(span.stop_us for span in spans)
    recorded = replace(recorded_round(PLAN, 1, 1.0), spans=(*spans, *beside), duration_us=last)
    figures = measured_figures(recorded, PLAN, run_info())
    assert (figures.draft_us, figures.exposed_draft_us, figures.hidden_draft_us) == (15, 0, 15)
    assert figures.bubbles_us == last - 68
    assert figures.bubble_fill == pytest.approx(15 / (last - 68))


def test_a_wait_for_the_link_is_for_the_draft_if_the_link_waited_for_it() -> None:
    def through_link(cause: str) -> list[bool]:
        late = replace(PLAN.tasks[1], why="waits for", cause=cause, earlier=True)
        plan = replace(PLAN, tasks=(PLAN.tasks[0], late, *PLAN.tasks[2:]))
        return [wait.for_draft for wait in planned_waits(plan) if wait.task == "attend/0/0"]

    assert through_link("draft/1") == [True]
    assert through_link("attend/2/3") == [False]
    assert through_link("fetch/2/3") == [False]


def test_the_bubble_from_the_round_before_is_drawn_at_the_end() -> None:
    waits = planned_waits(PLAN)
    assert (waits[-1].start_us, waits[-1].stop_us, waits[-1].task) == (PERIOD_US - 40, PERIOD_US, "piece/0")
    assert exposed_draft(planned_drafting(PLAN), waits) == [(128, 148), (148, 168)]
    assert all(0 <= wait.start_us < wait.stop_us <= PERIOD_US for wait in waits)


def test_measured_waits_say_what_ended_last_meanwhile() -> None:
    recorded = recorded_round(PLAN, 1, 1.0)
    waits = measured_waits(recorded, PLAN)
    assert waits[0].text == "5 us before attend/0/0, right after fetch/0/0"
    assert waits[-1].text == "40 us at the end of the round, right after draft/1"
    assert exposed_draft(measured_drafting(recorded, PLAN), waits) == [(128, 148), (148, 168)]


def test_a_draft_that_takes_longer_than_was_planned_is_exposed() -> None:
    """Planned beside the target, which waits for none of it; it ran on after the target was done."""
    plan = replace(planned_round(layers=3, groups=4, draft_us=0.0), exposed_draft_us=0.0)
    last = plan.period_us
    spans = [span for span in recorded_round(plan, 1, 1.0).spans if not span.task.startswith("draft/")]
    beside = (MeasuredSpan("draft/0", 20, 90), MeasuredSpan("draft/1", 90, last + 30))
    recorded = replace(recorded_round(plan, 1, 1.0), spans=(*spans, *beside), duration_us=last + 30)
    figures = measured_figures(recorded, plan, run_info())
    assert (figures.draft_us, figures.exposed_draft_us) == (10 + last, 30)


def test_a_gap_in_which_nothing_ended_has_no_cause() -> None:
    spans = (MeasuredSpan("piece/0", 0, 5), MeasuredSpan("fetch/0/0", 0, 4), MeasuredSpan("accept", 9, 10))
    recorded = replace(recorded_round(PLAN, 1, 1.0), spans=spans, duration_us=10)
    (wait,) = measured_waits(recorded, PLAN)
    assert (wait.text, wait.for_draft) == ("4 us before accept", False)


def test_what_is_in_flight_counts_within_the_round() -> None:
    """A fetch that the round found in flight has its own name, though the plan lists it as one that is ahead."""
    ahead = PlannedTask("ahead/0/0", "link", "fetch", 160, 170, 0, "lane", "", False, 0, 0, 0, bytes=GROUP_BYTES)
    plan = replace(PLAN, tasks=(*(t for t in PLAN.tasks if t.name != "fetch/0/0"), ahead))
    spans = (MeasuredSpan("piece/0", 0, 5), MeasuredSpan("fetch/0/0", -6, 4), MeasuredSpan("ahead/0/0", 160, 170))
    recorded = replace(recorded_round(plan, 1, 1.0), spans=spans)
    figures = measured_figures(recorded, plan, run_info())
    assert figures.busy_us is not None
    assert figures.busy_us["link"] == 4 + 8
    layer = measured_layers(recorded, plan)[1]
    assert (layer.layer, layer.link_us, layer.link_bytes) == (0, 10, GROUP_BYTES)


def test_a_task_that_the_plan_lacks_is_an_error() -> None:
    recorded = replace(recorded_round(PLAN, 1), spans=(MeasuredSpan("attend/9/9", 0, 1),))
    with pytest.raises(ValueError, match="task 'attend/9/9', which is not in its plan"):
        measured_figures(recorded, PLAN, run_info())


def test_layers() -> None:
    planned = planned_layers(PLAN)
    assert [layer.layer for layer in planned] == [-1, 0, 1, 2]
    none, first, second, _ = planned
    assert (none.target_us, none.link_bytes, none.bytes_per_us) == (3, 0, None)
    assert (first.target_us, first.link_us, first.link_bytes) == (5 + 20, 40, 4 * GROUP_BYTES)
    assert first.bytes_per_us == GROUP_BYTES / FETCH_US
    # 40 us before its piece, and 5 before each of its attends; so the next layer's four.
    assert (first.waited_us, second.waited_us) == (60, 20)
    measured = measured_layers(recorded_round(PLAN, 1, 2.0), PLAN)
    assert [each.target_us for each in measured] == pytest.approx([2 * each.target_us for each in planned])
    assert [each.waited_us for each in measured] == pytest.approx([2 * each.waited_us for each in planned])
    assert measured[2].bytes_per_us == pytest.approx(GROUP_BYTES / FETCH_US / 2)


def test_only_the_whole_round_was_measured() -> None:
    recorded = recorded_round(PLAN, 1, spans=False)
    figures = measured_figures(recorded, PLAN, run_info(link_bytes_per_us=None))
    assert figures.duration_us == recorded.duration_us
    assert (figures.busy_us, figures.bubbles_us, figures.draft_us, figures.bubble_fill) == (None, None, None, None)
    assert (figures.link_floor_us, figures.over_link_floor, figures.link_utilization) == (None, None, None)
    assert measured_layers(recorded, PLAN) == []


def test_a_run() -> None:
    rounds = [recorded_round(PLAN, index, 1.0 + index / 10) for index in range(6)]
    figures = run_figures(run_info(), [RoundSummary.of(each) for each in rounds])
    decode_us = sum(each.duration_us for each in rounds[1:])
    assert (figures.num_rounds, figures.num_decode_rounds, figures.num_verify_rounds) == (6, 5, 10)
    # accepted: 1, 2, 3, 4, 0 of four; the second request is verified without candidates
    assert (figures.num_draft_tokens, figures.num_accepted_tokens) == (20, 10)
    assert figures.accepted_per_position == (4, 3, 2, 1)
    assert figures.acceptance_per_position == (0.4, 0.3, 0.2, 0.1)
    assert figures.mean_acceptance_length == 2.0
    assert figures.decode_tokens == 10 + 5 + 5
    assert figures.tokens_per_second == pytest.approx(20 / decode_us * 1e6)
    assert figures.link_utilization == pytest.approx(5 * 120 / decode_us)
    assert figures.over_link_floor == pytest.approx(decode_us / 600)
    assert (figures.typical_round, figures.median_round_us) == (3, rounds[3].duration_us)
    assert figures.slowest_round_us == rounds[5].duration_us
    assert figures.link_bytes == 6 * (PLAN.streamed_bytes + GROUP_BYTES)


def test_a_run_without_rounds() -> None:
    figures = run_figures(run_info(), [])
    assert (figures.num_rounds, figures.mean_acceptance_length, figures.acceptance_per_position) == (0, 1.0, ())
    assert (figures.typical_round, figures.median_round_us, figures.link_utilization) == (None, None, None)


def test_a_run_of_prompts_alone_opens_at_its_last_round() -> None:
    summary = RoundSummary.of(RecordedRound(7, 0, 9, 0, 0, 0, (RequestRound(0, 64, 0, 0, 0),)))
    assert run_figures(run_info(), [summary]).typical_round == 7


COUNTED = (
    "num_rounds",
    "num_verify_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "accepted_per_position",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_per_position",
    "generated_tokens",
    "decode_tokens",
    "decode_seconds",
    "tokens_per_second",
    "streamed_bytes",
    "streamed_bytes_per_round",
)


@pytest.mark.parametrize("draft", [None, model("llama", seed=1)], ids=["alone", "drafting"])
def test_figures_of_an_engines_rounds_are_its_own_metrics(
    draft: nn.Module | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model("llama"), draft, max_model_len=256, max_num_seqs=2, gpu_kv_budget="min", chunk_tokens=8)
    rounds: list[RecordedRound] = []
    count = engine._counters.count_round

    def record(rows: Sequence[RequestRows], streamed_bytes: int, seconds: float) -> None:
        requests = tuple(
            RequestRound(
                row.sequence.request_id,
                len(row.tokens) if row.prompt else 0,
                len(row.candidates.tokens),
                row.accepted,
                len(row.produced),
            )
            for row in rows
        )
        rounds.append(RecordedRound(len(rounds), 0.0, seconds * 1e6, 0, streamed_bytes, streamed_bytes, requests))
        count(rows, streamed_bytes, seconds)

    monkeypatch.setattr(engine._counters, "count_round", record)
    for length in (70, 90):
        engine.submit(prompt(length), max_new_tokens=12)
    while engine.has_unfinished:
        engine.step()
    metrics = engine.metrics()
    figures = run_figures(run_info(), [RoundSummary.of(each) for each in rounds])
    assert metrics.streamed_bytes > 0
    assert (metrics.num_draft_tokens > 0) == (draft is not None)
    for name in COUNTED:
        assert getattr(figures, name) == pytest.approx(getattr(metrics, name)), name
