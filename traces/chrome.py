"""Rounds in the form in which torch.profiler writes them, for torch-tb-profiler, Perfetto and HolisticTraceAnalysis.

A lane is a stream of device 0, a round a step of the profiler on the host's thread. Of a round of which only the whole
was measured there are no tasks: what is predicted is not mixed with what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from specstream.traces.packed_text import PackedText
from specstream.traces.records import PlannedRound, PlannedTask, RecordedRound, RunInfo

MOST_ROUNDS = 64
"""In a file: torch-tb-profiler takes 44 s for 2,000."""
DEVICE, HOST = 0, 1
"""Process ids. That of a device is its number, as the readers expect it; threads of it are streams."""
COPIES = {"fetch": "Memcpy HtoD (Pinned -> Device)", "offload": "Memcpy DtoH (Device -> Pinned)"}
"""Names of copies by the kind of task: readers tell the direction from them."""

Event = dict[str, Any]


class Trace(PackedText):
    """A file in JSON, to which rounds are added, at most `MOST_ROUNDS`."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        about = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": DEVICE, "name": str(info.machine.get("device", "")), "totalGlobalMem": 0}],
            "displayTimeUnit": "ms",
            "traceName": info.name,
            "traceEvents": list(_names(info.lanes)),
        }
        end = "]}"
        super().__init__(_json(about).removesuffix(end), end)

    def add_round(self, recorded: RecordedRound, plan: PlannedRound) -> None:
        """`plan` is the round's."""
        self.add("".join(f",{_json(event)}" for event in round_events(self._info, plan, recorded)))


def round_events(info: RunInfo, plan: PlannedRound, recorded: RecordedRound) -> Iterator[Event]:
    """What happened in a round, in us since the run began."""
    tasks = {task.name: task for task in plan.tasks}
    stop = recorded.start_us + recorded.duration_us
    step = _range("user_annotation", f"ProfilerStep#{recorded.index}", HOST, HOST, recorded.start_us, stop)
    yield step | {"args": _round_args(recorded)}
    yield from _counters(recorded)
    if recorded.spans:  # device events without one are left out by some readers
        launch = _range("cuda_runtime", "cudaGraphLaunch", HOST, HOST, recorded.start_us, recorded.start_us)
        yield launch | {"args": {"correlation": recorded.index + 1, "External id": recorded.index + 1}}
    for span in recorded.spans:
        task = tasks[span.task]
        kind = "gpu_memcpy" if task.kind in COPIES else "kernel"
        begin, end = recorded.start_us + span.start_us, recorded.start_us + span.stop_us
        stream = info.lanes.index(task.lane) + 1
        event = _range(kind, COPIES.get(task.kind, task.kind), DEVICE, stream, begin, end)
        yield event | {"args": _task_args(task, stream, recorded.index + 1, end - begin)}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _names(lanes: Sequence[str]) -> Iterator[Event]:
    """What processes and threads are called, and in which order they are drawn."""
    for process, name in ((HOST, "rounds"), (DEVICE, "lanes")):
        yield _meta("process_name", process, 0, name=name)
        yield _meta("process_sort_index", process, 0, sort_index=int(process == DEVICE))
    yield _meta("thread_name", HOST, HOST, name="rounds")
    for stream, lane in enumerate(lanes, 1):
        yield _meta("thread_name", DEVICE, stream, name=lane)
        yield _meta("thread_sort_index", DEVICE, stream, sort_index=stream)


def _meta(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _range(category: str, name: str, process: int, thread: int, start_us: float, stop_us: float) -> Event:
    start = round(start_us, 3)
    duration = max(0.0, round(round(stop_us, 3) - start, 3))
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": duration}


def _counters(recorded: RecordedRound) -> Iterator[Event]:
    start, requests = round(recorded.start_us, 3), recorded.requests
    tokens = {name: sum(getattr(each, name) for each in requests) for name in ("candidates", "accepted", "produced")}
    for name, values in (("tokens", tokens), ("streamed bytes", {"streamed": recorded.streamed_bytes})):
        yield {"ph": "C", "name": name, "pid": HOST, "ts": start, "args": values}


def _round_args(recorded: RecordedRound) -> dict[str, Any]:
    requests = ", ".join(str(each.request_id) for each in recorded.requests)
    return {
        "plan": recorded.plan,
        "requests": requests,
        "streamed bytes": recorded.streamed_bytes,
        "fetched bytes": recorded.fetched_bytes,
        "External id": recorded.index + 1,
    }


def _task_args(task: PlannedTask, stream: int, correlation: int, duration_us: float) -> dict[str, Any]:
    args: dict[str, Any] = {"device": DEVICE, "stream": stream, "correlation": correlation, "External id": correlation}
    args["task"] = task.name
    args |= {name: getattr(task, name) for name in ("layer", "group", "slot", "step") if getattr(task, name) >= 0}
    if task.kind in COPIES:
        speed = task.bytes / duration_us / 1e3 if duration_us > 0 else 0.0
        args |= {"bytes": task.bytes, "memory bandwidth (GB/s)": round(speed, 3)}
    return args
