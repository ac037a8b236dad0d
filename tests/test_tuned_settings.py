"""What settings become with another value of one of them."""

from __future__ import annotations

from dataclasses import replace

from specstream.fan_out import SECOND_MODEL
from specstream.options import Options
from specstream.planning import Planning
from specstream.profiles import H200
from specstream.tuned_settings import TunedSettings, changes, open_settings
from specstream.tuning import predicted_rate
from specstream.workload import Workload
from tests.helpers import captured, model
from tests.test_lookahead import near
from tests.test_tuning import OPEN, SMALL


def test_the_next_windows_are_tried() -> None:
    target, draft = captured(model("qwen3")), captured(near())
    options = Options(**OPEN | {"draft_window": "auto"})
    of_another = {None: {128}, 128: {64, None}, 64: {128}}
    for drafter, others in ((draft, of_another), (target, {128: {64}, 64: {128}})):
        planning = Planning(target, drafter, H200, 1 << 40)
        untuned = TunedSettings.chosen(options, planning)
        for window, found in others.items():
            tried = changes(options, planning, texts=True)["draft_window"](replace(untuned, draft_window=window))
            assert {each.draft_window for each in tried} == found


def test_branches_are_chosen_with_lookahead_alone() -> None:
    """And lookahead itself on a device of its own; a round in which nothing was foreseen takes as long as others."""
    target, draft = captured(model("qwen3")), captured(near())
    planning = Planning(target, draft, H200, 1 << 40)
    options = Options(**OPEN | {"gpu_kv_budget": "auto"})
    untuned = TunedSettings.chosen(options, planning)
    assert untuned.lookahead_branches == 0
    other = changes(options, planning)
    assert not other["lookahead_branches"](untuned)
    (ahead,) = (each for each in other["drafting"](untuned) if each.drafting == "lookahead")
    assert ahead.lookahead_branches == SECOND_MODEL.branches
    assert ahead.given_to(options).lookahead_branches == SECOND_MODEL.branches
    near_it = {each.lookahead_branches: each for each in other["lookahead_branches"](ahead)}
    assert set(near_it) == {32, 128}
    assert {replace(each, lookahead_branches=64) for each in near_it.values()} == {ahead}
    few = replace(ahead, lookahead_branches=8)
    assert [each.lookahead_branches for each in other["lookahead_branches"](few)] == [16]
    assert all(not each.lookahead_branches for each in other["drafting"](few))
    assert {each.lookahead_branches for each in other["num_speculative_tokens"](few)} == {8}
    workload = Workload(256, 2, 0.8)
    rates = [predicted_rate(each.given_to(options), planning, workload) for each in (few, near_it[32], near_it[128])]
    assert rates[1] == max(rates), "few are seldom right, and many read much"
    fixed = Options(**SMALL | {"drafting": "lookahead", "lookahead_branches": 5})
    assert "lookahead_branches" not in open_settings(fixed)
    assert planning.fan_out(fixed).branches == 5
