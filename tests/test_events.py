"""TensorBoard's own file of a run, as TensorBoard reads it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specstream.pipeline import PassRunner
from specstream.planner import round_passes
from specstream.profiles import CPU_PROFILE
from specstream.round_plan import Plan, lane_of
from specstream.round_work import NO_DRAFT
from specstream.traces import run_writer
from specstream.traces.events import EventFile, task_graph
from specstream.traces.figures import measured_figures, run_figures
from specstream.traces.records import RecordedRound, RequestRound, RoundSummary
from specstream.traces.run_writer import RunWriter
from tests.helpers import new_engine, prompt, step_to_end
from tests.simulation_cases import streaming_plans
from tests.test_run_writer import interrupted_at, twice
from tests.toy import make_plan, round_spec, seat, toy_model
from tests.trace_cases import INFO, on_disk, toy_plan, toy_round

PLAN = toy_plan()
FEW = make_plan(round_spec(seat(streamed=4, offload=1), layers=2, group=1))


def read(folder: Path) -> Any:
    """All that is in the files of a run."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder: Path, name: str) -> dict[int, float]:
    """By round; nothing if there is no such scalar."""
    accumulator = read(folder)
    tag = f"round/{name}"
    found = accumulator.Scalars(tag) if tag in accumulator.Tags()["scalars"] else []
    assert len({each.step for each in found}) == len(found)
    return {each.step: each.value for each in found}


def decode_round(index: int) -> RecordedRound:
    """No prompt in it; two of three are slower than planned, and only measured as a whole."""
    slower = 1 + index % 3
    recorded = toy_round(index, PLAN)
    return replace(
        recorded,
        duration_us=recorded.duration_us * slower,
        streamed_bytes=recorded.streamed_bytes + index,
        requests=(RequestRound(7, 0, 4, index % 5, index % 5 + 1),),
        spans=recorded.spans if slower == 1 else (),
    )


def test_scalars_are_the_figures_of_each_round(tmp_path: Path) -> None:
    rounds = [decode_round(index) for index in range(70)]
    with RunWriter(tmp_path, "run", INFO) as writer:
        writer.plan_id("a", lambda _: PLAN)
        for each in rounds:
            writer.add(each)
    alone = {each.index: run_figures(INFO, [RoundSummary.of(each)]) for each in rounds}
    measured = {each.index: measured_figures(each, PLAN, INFO) for each in rounds}
    wanted: dict[str, dict[int, float | None]] = {
        "duration_ms": {index: each.duration_us / 1e3 for index, each in measured.items()},
        "streamed_bytes": {index: each.streamed_bytes for index, each in measured.items()},
        "link_utilization": {index: each.link_utilization for index, each in measured.items()},
        "bubble_fill": {index: each.bubble_fill for index, each in measured.items() if each.bubble_fill is not None},
        "tokens_per_second": {index: each.tokens_per_second for index, each in alone.items()},
        "mean_acceptance_length": {index: each.mean_acceptance_length for index, each in alone.items()},
    }
    assert set(wanted["bubble_fill"]) == {index for index in range(70) if index % 3 == 0}
    assert set(read(writer.path).Tags()["scalars"]) == {f"round/{name}" for name in wanted}
    for name, values in wanted.items():
        assert scalars(writer.path, name) == pytest.approx(values, rel=1e-6), name
    assert len(set(scalars(writer.path, "tokens_per_second").values())) > 5


def test_a_round_with_a_prompt_has_no_decode_figures(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "run", INFO) as writer:
        writer.plan_id("a", lambda _: PLAN)
        writer.add(RecordedRound(0, 0.0, 9.0, 0, 0, 0, (RequestRound(1, 16, 0, 0, 1),)))
        writer.add(RecordedRound(1, 9.0, 9.0, 0, 0, 0, toy_round(0, PLAN).requests))
    assert scalars(writer.path, "duration_ms") == pytest.approx({0: 0.009, 1: 0.009})
    assert scalars(writer.path, "tokens_per_second") == {}
    assert scalars(writer.path, "link_utilization") == scalars(writer.path, "bubble_fill") == {}
    assert list(scalars(writer.path, "mean_acceptance_length")) == [1]


def test_they_stand_at_the_time_of_the_round(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "run", INFO) as writer:
        writer.plan_id("a", lambda _: PLAN)
        for index in range(3):
            writer.add(toy_round(index, PLAN))
    began = datetime.fromisoformat(INFO.started).timestamp()
    times = [each.wall_time - began for each in read(writer.path).Scalars("round/duration_ms")]
    assert times == pytest.approx([toy_round(index, PLAN).start_us / 1e6 for index in range(3)], abs=1e-6)


@given(streaming_plans())
def test_the_graph_has_the_tasks_and_the_edges_of_the_round_graph(plan: Plan) -> None:
    check_graph(task_graph(plan), plan)


def check_graph(found: Any, plan: Plan) -> None:
    """That a GraphDef is the graph of a plan, with the edges that the passes gave it."""
    tasks = {node.attr["task"].s.decode(): node for node in found.node}
    assert tasks.keys() == plan.by_name.keys()
    named = {node.name: task for task, node in tasks.items()}
    assert len(named) == len(tasks)
    assert not any(one != other and other.startswith(f"{one}/") for one in named for other in named)
    for name, node in tasks.items():
        task = plan.by_name[name]
        layer = [f"layer_{task.layer}"] if task.layer >= 0 else []
        assert node.name.split("/") == [lane_of(task).value, *layer, name.replace("/", "_")]
        assert (node.op, node.device) == (task.kind.value, lane_of(task).value)
        assert node.attr["link_bytes"].i == task.link_bytes
        assert node.attr["predicted_us"].f == pytest.approx(task.cost_us)
    edges = edges_of(plan)
    assert {(named[i], name) for name, node in tasks.items() for i in node.input if not i.startswith("^")} == {
        edge for edge, why in edges.items() if why == "data"
    }
    assert {(named[i[1:]], name) for name, node in tasks.items() for i in node.input if i.startswith("^")} == {
        edge for edge, why in edges.items() if why != "data"
    }


def edges_of(plan: Plan) -> dict[tuple[str, str], str]:
    """The edges of the round graph that the passes made, by the passes that come before the lanes."""
    passes = round_passes(plan.spec, CPU_PROFILE, NO_DRAFT)[:-1]
    graph = PassRunner("toy", None).run(passes, toy_model(plan.spec.num_layers))
    return {(earlier, name): why for name, edges in graph.before.items() for earlier, why in edges.items()}


def test_the_first_plan_of_a_run_is_its_graph(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, "run", INFO)
    writer.add_graph(FEW)
    writer.add_graph(make_plan(round_spec(seat(), layers=1)))
    writer.close()
    accumulator = read(writer.path)
    assert accumulator.Tags()["graph"]
    check_graph(accumulator.Graph(), FEW)


def test_an_engine_writes_both(tmp_path: Path) -> None:
    with new_engine() as engine, engine.trace(tmp_path) as run:
        engine.submit(prompt(14), max_new_tokens=12)
        step_to_end(engine)
    found = on_disk(run)
    assert scalars(run, "streamed_bytes") == {index: each.streamed_bytes for index, each in found.rounds.items()}
    tasks = {node.attr["task"].s.decode() for node in read(run).Graph().node}
    launched = {task.name for task in found.plans[0].tasks}
    assert launched <= tasks
    assert len(tasks) > 5


def test_a_long_run_is_written_less_and_less_often(tmp_path: Path) -> None:
    events = EventFile(tmp_path, INFO, rounds=4)
    for index in range(40):
        events.add(toy_round(index, PLAN), PLAN)
    assert list(scalars(tmp_path, "duration_ms")) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    events = EventFile(tmp_path, INFO, rounds=9)
    for index in (0, 1, 2, 0, 1, 2, 3, 4):
        events.add(toy_round(index, PLAN), PLAN)
    assert list(scalars(tmp_path, "duration_ms")) == [0, 1, 2, 3, 4]


def test_a_torn_record_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = EventFile(tmp_path, INFO, rounds=9)
    events.add(toy_round(0, PLAN), PLAN)
    size, opened = os.stat(events.path).st_size, Path.open

    class Torn(io.BytesIO):
        def write(self, data: Any) -> int:
            with opened(events.path, "ab") as file:
                file.write(bytes(data)[:20])
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: Torn())
        with pytest.raises(KeyboardInterrupt):
            events.add(toy_round(1, PLAN), PLAN)
    assert os.stat(events.path).st_size == size + 20
    assert list(scalars(tmp_path, "duration_ms")) == [0]
    for index in (1, 2):
        events.add(toy_round(index, PLAN), PLAN)
    assert list(scalars(tmp_path, "duration_ms")) == [0, 1, 2]


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_write_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN_SAVES", -1.0)
    for count in range(1, 8):
        writer = RunWriter(tmp_path, "run", INFO, 8)
        writer.plan_id("a", lambda _: PLAN)
        with monkeypatch.context() as patch:
            patch.setattr(EventFile, "_append", interrupted_at(count, EventFile._append, after=after))
            for index in range(6):
                with suppress(KeyboardInterrupt):
                    writer.add(toy_round(index, PLAN))
            twice(writer.close)
        assert list(scalars(writer.path, "duration_ms")) == list(range(6))
        assert [each.index for each in on_disk(writer.path).summaries] == list(range(6))


def test_rounds_are_there_before_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN_SAVES", -1.0)
    writer = RunWriter(tmp_path, "run", INFO)
    writer.plan_id("a", lambda _: PLAN)
    for index in range(3):
        writer.add(toy_round(index, PLAN))
        assert len(scalars(writer.path, "duration_ms")) == index + 1


def test_without_the_extra_there_is_no_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "specstream.traces.events")
    with new_engine() as engine, engine.trace(tmp_path) as run:
        engine.submit(prompt(14), max_new_tokens=12)
        step_to_end(engine)
    assert not list(tmp_path.rglob("*tfevents*"))
    assert len(on_disk(run).rounds) > 2


def test_importing_specstream_needs_neither_tensorboard_nor_matplotlib() -> None:
    program = "import sys, specstream; specstream.compile; print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert {"torch", "specstream"} <= set(done.stdout.split())
    assert not {"tensorboard", "matplotlib"} & set(done.stdout.split())


def test_the_graph_is_that_of_the_first_verification(tmp_path: Path) -> None:
    with new_engine(max_num_batched_tokens=7) as engine, engine.trace(tmp_path) as run:
        engine.submit(prompt(30), max_new_tokens=8)
        step_to_end(engine)
    found, accumulator = on_disk(run), EventAccumulator(str(run))
    accumulator.Reload()
    first = next(each for each in found.rounds.values() if not any(request.prompt_tokens for request in each.requests))
    assert first.index > 0
    nodes = {node.attr["task"].s.decode() for node in accumulator.Graph().node}
    assert nodes == {task.name for task in found.plans[first.plan].tasks}
    assert nodes != {task.name for task in found.plans[found.rounds[0].plan].tasks}
