"""Trace files for other tools: what is in them, and that torch-tb-profiler reads them as they are meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specstream.traces.records import PlannedRound, RecordedRound
from specstream.traces.run_writer import RunWriter
from specstream.traces.validate import validate
from tests.helpers import make_engine, model
from tests.test_tracing import serve_three
from tests.trace_cases import INFO, events_of, on_disk, toy_plan, toy_round


def written(logdir: Path, rounds: int, name: str = "run", *, measured: bool = True) -> list[Path]:
    with RunWriter(logdir, name, INFO) as writer:
        for index in range(rounds):
            plan = toy_plan(writer.plan_id("a", toy_plan))
            writer.add(toy_round(index, plan, measured=measured))
    return on_disk(writer.path).traces


def of_category(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") in categories]


def test_every_task_is_on_its_lane_when_it_ran(tmp_path: Path) -> None:
    (trace,) = written(tmp_path, 3)
    plan, events = toy_plan(), events_of(trace)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert list(lanes.values()) == ["target", "link", "store", "draft"]
    tasks = of_category(events, "kernel", "gpu_memcpy")
    assert len(tasks) == 3 * len(plan.tasks)
    for number, event in enumerate(tasks):
        recorded, task = toy_round(number // len(plan.tasks), plan), plan.tasks[number % len(plan.tasks)]
        assert (event["args"]["task"], lanes[event["tid"]]) == (task.name, task.lane)
        assert event["ts"] == pytest.approx(recorded.start_us + task.start_us, abs=1e-3)
        assert event["dur"] == pytest.approx(task.stop_us - task.start_us, abs=2e-3)
        if task.kind in ("fetch", "offload"):
            assert event["name"].startswith("Memcpy HtoD" if task.kind == "fetch" else "Memcpy DtoH")
            assert event["args"]["bytes"] == task.bytes
            speed = task.bytes / (task.stop_us - task.start_us) / 1e3
            assert event["args"]["memory bandwidth (GB/s)"] == pytest.approx(speed, abs=1e-3)
        else:
            assert event["name"] == task.kind
    launches = {event["args"]["correlation"] for event in of_category(events, "cuda_runtime")}
    assert launches == {event["args"]["correlation"] for event in tasks} == {1, 2, 3}


def test_rounds_are_steps_and_their_tokens_are_counters(tmp_path: Path) -> None:
    (trace,) = written(tmp_path, 3, measured=False)
    events = events_of(trace)
    steps = of_category(events, "user_annotation")
    assert [step["name"] for step in steps] == [f"ProfilerStep#{index}" for index in range(3)]
    assert [step["args"]["requests"] for step in steps] == ["7, 8"] * 3
    tokens = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "tokens"]
    assert tokens == [{"candidates": 4, "accepted": n, "produced": n + 2} for n in range(3)]
    assert not of_category(events, "kernel", "gpu_memcpy", "cuda_runtime")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all sorts: of one file and of two, of an engine, without times of tasks."""
    logdir = tmp_path_factory.mktemp("logs")
    written(logdir, 5, "one")
    written(logdir, 150, "two")
    written(logdir, 5, "whole rounds", measured=False)
    engine = make_engine(model("qwen3"), model("qwen3", seed=1), max_model_len=48, gpu_kv_budget="min")
    with engine, engine.trace(logdir, run="nested/engine"):
        serve_three(engine)
    return logdir


@pytest.fixture(scope="module")
def profile_tab(runs: Path) -> dict[str, Any]:
    pytest.importorskip("torch_tb_profiler", reason="torch-tb-profiler is not installed: pip install .[tensorboard]")
    program = Path(__file__).with_name("profile_tab.py")
    environment = os.environ | {"TORCH_PROFILER_START_METHOD": "fork"}  # spawned ones take seconds to import pandas
    done = subprocess.run(
        [sys.executable, str(program), str(runs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["one", "two", "whole rounds", "nested/engine"])
def test_torch_tb_profiler_has_our_rounds_as_steps(name: str, runs: Path, profile_tab: dict[str, Any]) -> None:
    found, parts = on_disk(runs / name), profile_tab[name]
    assert len(parts) == len(found.traces)
    steps = {step: us for part in parts for step, us in part["steps"].items() if step != "Average"}
    newest = list(found.rounds.values())[-len(steps) :]
    assert list(steps) == [str(recorded.index) for recorded in newest]
    assert len(steps) == (86 if name == "two" else len(found.rounds))
    for recorded in newest:
        assert steps[str(recorded.index)] == pytest.approx(recorded.duration_us, rel=0.01)
    calls = sum((Counter(part["calls"]) for part in parts), Counter[str]())
    kinds = (kind_of(span.task, found.plans[each.plan]) for each in newest for span in each.spans)
    assert calls == Counter(kind for kind in kinds if kind not in ("fetch", "offload"))
    assert all("Overview" in part["views"] for part in parts)


def kind_of(task: str, plan: PlannedRound) -> str:
    return next(each.kind for each in plan.tasks if each.name == task)


def test_the_profile_tab_lists_all_runs(profile_tab: dict[str, Any]) -> None:
    assert sorted(profile_tab) == ["nested/engine", "one", "two", "whole rounds"]


def test_all_files_are_valid(runs: Path) -> None:
    files = sorted(runs.rglob("*.pt.trace.json.gz"))
    assert len(files) == 5
    assert [validate(file) for file in files] == [[]] * 5
    spans = [recorded.spans for recorded in on_disk(runs / "nested/engine").rounds.values()]
    assert all(spans)
    assert isinstance(on_disk(runs / "one").rounds[0], RecordedRound)
