"""Passes from the cut model to a plan: what they list, in which order, with which waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from specstream.errors import InvalidPlan
from specstream.passes.assign_lanes import AssignLanes
from specstream.passes.estimate_costs import EstimateCosts
from specstream.passes.expand_fetches import ExpandFetches
from specstream.passes.place_draft import PlaceDraft
from specstream.pipeline import PassRunner
from specstream.planner import Planner, round_passes
from specstream.profiles import CPU_PROFILE
from specstream.round_graph import Region, RoundGraph, Task, TaskKind
from specstream.round_plan import Lane, StepOp
from specstream.round_spec import RoundSpec, SeatSpec
from specstream.round_work import NO_DRAFT
from tests.toy import make_plan, round_spec, seat, toy_model

GOLDEN = Path(__file__).parent / "golden"
SPEC = round_spec(seat(streamed=3, offload=1), seat(1, resident=2, streamed=0), layers=2, slots=2, group=2)
PROMPTS = round_spec(
    SeatSpec(0, 0, 3, streamed=3, offload=4, open=3, span=5, buffer_start=0),
    SeatSpec(1, 2, 3, streamed=0, offload=3, open=0, span=5, buffer_start=5),
    layers=3,
    group=4,
    drafts=0,
)
"""A later part of one prompt and the whole of another."""


def expand(spec: RoundSpec) -> RoundGraph:
    return PlaceDraft().run(ExpandFetches(spec).run(toy_model(spec.num_layers)))


@pytest.mark.parametrize(("name", "spec"), [("round_graph.txt", SPEC), ("prompt_round_graph.txt", PROMPTS)])
def test_the_round_graph_reads_as_it_always_did(name: str, spec: RoundSpec) -> None:
    """To accept a change: delete the file, run the test (it writes the file and fails), read the difference."""
    path = GOLDEN / name
    text = expand(spec).to_text()
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was missing; it is written anew")
    assert text == path.read_text(encoding="utf-8")


def test_op_counts() -> None:
    counts = expand(SPEC).op_counts()
    assert counts == {
        "piece": 3,
        "append": 2,
        "local": 2,
        "fetch": 4 + 2,  # this round's, of which two came before it, and two ahead
        "attend": 4,
        "merge": 2,
        "offload": 2,
        "accept": 1,
        "draft": 2,
    }


def test_expand_fetches_checks_that_every_streamed_chunk_is_attended_to() -> None:
    graph = expand(SPEC)
    ExpandFetches(SPEC).check(graph)
    longer = ExpandFetches(replace(SPEC, seats=(seat(streamed=5),)))
    with pytest.raises(ValueError, match="are not the streamed ones"):
        longer.check(graph)


@pytest.mark.parametrize("beside", [False, True])
def test_draft_steps_are_placed_where_what_they_are_for_is_known(beside: bool) -> None:
    spec = replace(SPEC, drafts_beside=beside)
    graph = expand(spec)
    names = [task.name for task in graph.tasks]
    drafts = ["draft/0", "draft/1"]
    assert names[-3:] == ([*drafts, "accept"] if beside else ["accept", *drafts])
    assert ("accept" in graph.before["draft/0"]) is not beside
    assert graph.before["draft/1"] == {"draft/0": "data"} | ({} if beside else {"accept": "data"})
    assert graph.before["accept"].keys().isdisjoint(drafts)
    whole = RoundGraph.from_program(spec, graph.tasks)
    assert graph.before == whole.before, "as if the whole round had been listed at once"
    PlaceDraft().check(graph)


def test_place_draft_refuses_a_target_that_waits_for_a_draft_and_steps_that_are_missing() -> None:
    graph = expand(SPEC)
    waiting = replace(graph, before=graph.before | {"merge/1": {"draft/0": "data"}})
    with pytest.raises(ValueError, match="merge/1 waits for a draft step of its own round"):
        PlaceDraft().check(waiting)
    with pytest.raises(ValueError, match=r"draft steps \[0, 1\] are not the round's 3"):
        PlaceDraft().check(replace(graph, spec=replace(SPEC, draft_steps=3)))


def test_estimate_costs_prices_bytes_and_refuses_free_tasks() -> None:
    graph = expand(SPEC)
    priced = EstimateCosts(CPU_PROFILE).run(graph)
    fetch = next(t for t in priced.tasks if t.name == "fetch/0/0")
    assert fetch.cost_us == CPU_PROFILE.launch_us + 200 / CPU_PROFILE.host_to_device_bytes_per_us
    with pytest.raises(ValueError, match=r"tasks without a cost: .'piece/0'"):
        EstimateCosts(CPU_PROFILE).check(graph)


def test_edges_say_why() -> None:
    graph = expand(SPEC).graph
    assert graph.edges["fetch/0/0", "attend/0/0"]["why"] == "data"
    assert graph.edges["attend/0/0", "fetch/1/0"]["why"] == "reuse"
    assert graph.edges["offload/0/0", "ahead/0/1"]["why"] == "data"


def test_partly_overlapping_writes_keep_their_order() -> None:
    tasks = [
        Task("a", TaskKind.APPEND, writes=(Region("x", 0, 4),)),
        Task("b", TaskKind.APPEND, writes=(Region("x", 0, 2),)),
        Task("c", TaskKind.LOCAL, reads=(Region("x", 0, 4),)),
        Task("d", TaskKind.LOCAL, reads=(Region("x", 4, 8),)),
    ]
    graph = RoundGraph.from_program(SPEC, tasks).graph
    assert sorted(graph.edges) == [("a", "b"), ("a", "c"), ("b", "c")]


def test_a_cycle_is_no_round_graph() -> None:
    tasks = Task("a", TaskKind.APPEND), Task("b", TaskKind.LOCAL)
    with pytest.raises(ValueError, match="cycle"):
        RoundGraph(SPEC, tasks, {"a": {"b": "data"}, "b": {"a": "data"}}).validate()
    backwards = RoundGraph(SPEC, tasks, {"a": {"b": "data"}, "b": {}})
    backwards.validate()
    assert list(nx.topological_sort(backwards.graph)) == ["b", "a"]


def test_fetches_are_launched_as_soon_as_their_slot_is_free() -> None:
    plan = make_plan(round_spec(seat(streamed=4), slots=2))
    launches = [s.name for s in plan.steps if s.op is StepOp.LAUNCH]
    assert launches.index("fetch/1/0") == launches.index("attend/0/0") + 1
    assert launches.index("ahead/0/0") < launches.index("piece/2"), "the next round's fetches start before it ends"
    assert launches.index("ahead/0/1") < launches.index("accept")


def test_waits_are_only_those_that_are_not_implied() -> None:
    plan = make_plan(round_spec(seat(streamed=4), slots=2))
    waits = [(s.lane, s.name) for s in plan.steps if s.op is StepOp.WAIT]
    assert len(waits) == len(set(waits))
    assert waits.count((Lane.TARGET, "fetch/0/0")) == 1
    for step in plan.steps:
        if step.op is StepOp.WAIT:
            broken = replace(plan, steps=tuple(s for s in plan.steps if s != step))
            with pytest.raises(InvalidPlan):
                broken.check()


def test_a_wait_for_an_offload_stands_for_no_other() -> None:
    """A round of this form may have nothing to write out; then the fetch into the slot still waits for its reader."""
    plan = make_plan(round_spec(seat(streamed=1, offload=1), slots=3))
    waits = {step.name for step in plan.steps if step.op is StepOp.WAIT and step.lane is Lane.LINK}
    assert {"offload/1/0", "attend/0/0"} <= waits


def test_a_graph_that_cannot_be_ordered_is_a_deadlock() -> None:
    tasks = [
        Task("attend", TaskKind.ATTEND, reads=(Region("slot"),)),
        Task("fetch", TaskKind.FETCH, writes=(Region("slot"),)),
    ]
    graph = RoundGraph(SPEC, tuple(tasks), {"fetch": {"piece": "order"}, "attend": {"fetch": "data"}})
    with pytest.raises(InvalidPlan, match="deadlock: attend needs fetch, which cannot start before it"):
        AssignLanes().run(graph)


def test_the_runner_records_and_dumps(tmp_path: Path) -> None:
    runner = PassRunner("round", dump_dir=tmp_path)
    runner.run(round_passes(SPEC, CPU_PROFILE, NO_DRAFT), toy_model(2))
    names = ["expand_fetches", "place_draft", "estimate_costs", "assign_lanes"]
    assert [record.name for record in runner.records] == names
    assert runner.records[0].op_changes["fetch"] == 6
    assert [record.op_changes for record in runner.records[1:3]] == [{"draft": 2}, {}]
    files = sorted(path.name for path in (tmp_path / "round").iterdir())
    assert files == ["00_input.txt", *(f"{number:02d}_{name}.txt" for number, name in enumerate(names, 1))]
    assert "launch piece/0" in (tmp_path / "round" / files[-1]).read_text()


def test_a_plan_is_made_once_for_each_structure() -> None:
    planner = Planner(toy_model(2), CPU_PROFILE)
    assert planner.plan(SPEC) is planner.plan(replace(SPEC))
    assert planner.plan(SPEC) is not planner.plan(replace(SPEC, in_flight=1))
