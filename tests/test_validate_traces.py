"""Trace files that other tools cannot read, each with its mistake found."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specstream.traces.validate import validate
from tests.test_chrome import written

Event = dict[str, Any]
Events = list[Event]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (path,) = written(tmp_path_factory.mktemp("logs"), 3)
    assert validate(path) == []
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def first(events: Events, category: str) -> Event:
    return next(event for event in events if event.get("cat") == category)


def without(category: str, field: str) -> Callable[[Events], object]:
    return lambda events: first(events, category).pop(field)


def with_field(category: str, field: str, value: object) -> Callable[[Events], object]:
    return lambda events: first(events, category).update({field: value})


def with_arg(category: str, field: str, value: object) -> Callable[[Events], object]:
    return lambda events: first(events, category)["args"].update({field: value})


def added(**event: Any) -> Callable[[Events], object]:
    defaults = {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0, "args": {}}
    return lambda events: events.append(defaults | event)


def half_over(category: str) -> Callable[[Events], object]:
    """A range that begins within the first one of that kind and ends after it."""

    def add(events: Events) -> None:
        event = first(events, category)
        events.append(event | {"name": "late", "ts": event["ts"] + event["dur"] / 2})

    return add


def more_steps(events: Events) -> None:
    step = first(events, "user_annotation")
    events.extend(step | {"name": f"ProfilerStep#{n}", "ts": 1e6 * n} for n in range(3, 66))


def no_steps(events: Events) -> None:
    events[:] = [event for event in events if event.get("cat") != "user_annotation"]


BROKEN = {
    "no cat": (without("kernel", "cat"), "it has no cat"),
    "no name of a range": (without("user_annotation", "name"), "it has no name"),
    "no name of a counter": (added(ph="C", name=None), "it has no name"),
    "no ph": (without("kernel", "ph"), "it has no ph"),
    "no ts": (without("kernel", "ts"), "its ts is not a number"),
    "ts in words": (with_field("gpu_memcpy", "ts", "12"), "its ts is not a number"),
    "no dur": (without("kernel", "dur"), "its dur is not a number from 0"),
    "negative dur": (with_field("kernel", "dur", -1.0), "its dur is not a number from 0"),
    "no device": (lambda events: first(events, "kernel")["args"].pop("device"), "args.device is not a whole number"),
    "device in words": (with_arg("gpu_memcpy", "device", "0"), "args.device is not a whole number"),
    "too many devices": (with_arg("kernel", "device", 64), "args.device is not a whole number below 64"),
    "device of another": (with_field("kernel", "pid", 5), "its pid is not its device"),
    "no args": (without("kernel", "args"), "args.device is not a whole number"),
    "no stream": (with_arg("kernel", "stream", None), "its args.stream is not a whole number"),
    "thread in words": (with_field("user_annotation", "tid", "host"), "its tid is not a number"),
    "host ranges partly overlap": (half_over("user_annotation"), "pid 1, tid 1: .* partly overlap"),
    "device ranges partly overlap": (half_over("gpu_memcpy"), "pid 0, tid [23]: .* partly overlap"),
    "steps on the device": (
        added(cat="gpu_user_annotation", name="ProfilerStep#0", pid=0),
        "steps are user_annotations of the host",
    ),
    "step without a number": (with_field("user_annotation", "name", "ProfilerStep#"), "a step's number is missing"),
    "steps of one number": (with_field("user_annotation", "name", "ProfilerStep#1"), "two steps have one number"),
    "bubbles as kernels": (
        with_field("kernel", "name", "bubble: for fetch/1"),
        "where nothing runs is no kernel",
    ),
    "no steps": (no_steps, "no ProfilerStep#"),
    "too many steps": (more_steps, "66 steps: more than 64"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_every_mistake_is_found(broken: str, good: dict[str, Any], tmp_path: Path) -> None:
    spoil, problem = BROKEN[broken]
    trace = json.loads(json.dumps(good))
    spoil(trace["traceEvents"])
    path = tmp_path / "worker.1.pt.trace.json"
    path.write_text(json.dumps(trace))
    found = validate(path)
    assert found
    assert all(re.search(problem, each) for each in found), found


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it cannot be read: "),
        (b"[1", "it cannot be read: "),
        (b'{"traceEvents": [{"ph": "C", "name": "x", "ts": NaN}]}', "it cannot be read: NaN is not JSON"),
        (b"[]", "it has no traceEvents"),
        (b'{"traceEvents": [1]}', "it has no traceEvents"),
    ],
)
def test_files_that_are_no_traces(content: bytes, problem: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "worker.1.pt.trace.json", tmp_path / "worker.1.pt.trace.json.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    for path in (plain, packed):
        (found,) = validate(path)
        assert found.startswith(problem)
    packed.write_bytes(gzip.compress(content)[:-4])
    (cut,) = validate(packed)
    assert cut.startswith("it cannot be read: ")


@pytest.mark.parametrize(
    "name", ["trace.json", "worker.pt.trace.json.gz", "worker.one.pt.trace.json", ".1.pt.trace.json"]
)
def test_names_that_are_not_looked_for(name: str, good: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / name
    text = json.dumps(good).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (found,) = validate(path)
    assert "the name is not <worker>.<digits>.pt.trace.json" in found


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        validate(tmp_path / "worker.1.pt.trace.json")
