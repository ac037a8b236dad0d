"""What is wrong with a trace file for the programs that read it; of most mistakes these say that there is no run."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specstream.traces.chrome import MOST_ROUNDS

NAME = re.compile(r".+?\.\d+\.pt\.trace\.json(\.gz)?")
OF_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
OF_HOST = {"cpu_op", "operator", "python", "user_annotation", "runtime", "cuda_runtime"}
MOST_DEVICES = 64
STEP = "ProfilerStep#"
ROUNDING_US = 2e-3
"""Times have three digits after the point."""

Event = dict[str, Any]


def validate(path: str | Path) -> list[str]:
    """The problems of a trace file, in words; none if torch-tb-profiler, Perfetto and HolisticTraceAnalysis read it.

    Raises:
        OSError: there is no such file, or it may not be read.
    """
    path = Path(path)
    problems = []
    if not NAME.fullmatch(path.name):
        problems.append(f"{path.name}: the name is not <worker>.<digits>.pt.trace.json or that with .gz")
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        trace = json.loads(text, parse_constant=_no_number)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        return [*problems, f"it cannot be read: {error}"]
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return [*problems, "it has no traceEvents, a list of objects"]
    for number, event in enumerate(events):
        problems += [f"event {number}, {event.get('name')!r}: {problem}" for problem in _problems_of(event)]
    if problems:  # what follows needs times and names
        return problems
    ranges = [event for event in events if event["ph"] == "X"]
    return [*_overlaps(ranges), *_steps(ranges)]


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _problems_of(event: Event) -> Iterator[str]:
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield "it has no name"
    if not isinstance(event.get("ph"), str):
        yield "it has no ph"
    if not _is_number(event.get("ts")):
        yield "its ts is not a number"
    if event.get("ph") != "X":
        return
    category = event.get("cat")
    if not isinstance(category, str) or not category:
        yield "it has no cat"
    if not _is_number(event.get("dur")) or event["dur"] < 0:
        yield "its dur is not a number from 0"
    if category in OF_DEVICE:
        yield from _problems_on_device(event)
    elif category in OF_HOST and not _is_number(event.get("tid")):
        yield "its tid is not a number"
    name = str(event.get("name"))
    if name.startswith(STEP) and category != "user_annotation":
        yield "steps are user_annotations of the host"
    if name.startswith(STEP) and not name.removeprefix(STEP).isdecimal():
        yield "a step's number is missing"


def _problems_on_device(event: Event) -> Iterator[str]:
    args = event.get("args")
    device = args.get("device") if isinstance(args, dict) else None
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < MOST_DEVICES:
        yield f"its args.device is not a whole number below {MOST_DEVICES}"
    elif event.get("pid") != device:
        yield "its pid is not its device"
    elif not isinstance(args, dict) or not isinstance(args.get("stream"), int):
        yield "its args.stream is not a whole number"
    if event.get("cat") == "kernel" and re.search("bubble|idle|wait", str(event.get("name")), re.IGNORECASE):
        yield "where nothing runs is no kernel: it would count as use of the device"


def _overlaps(ranges: list[Event]) -> Iterator[str]:
    """Ranges of one thread or stream that partly overlap: one has to hold the other, or to end before it."""
    threads: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in ranges:
        if event["cat"] in OF_DEVICE | OF_HOST:
            threads[event["pid"], event.get("tid")].append(event)
    for (process, thread), events in threads.items():
        around: list[Event] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while around and _stop(around[-1]) <= event["ts"] + ROUNDING_US:
                around.pop()
            if around and _stop(event) > _stop(around[-1]) + ROUNDING_US:
                names = f"{around[-1]['name']!r} and {event['name']!r} at {event['ts']}"
                yield f"pid {process}, tid {thread}: {names} partly overlap"
            around.append(event)


def _steps(ranges: list[Event]) -> Iterator[str]:
    steps = sorted((event for event in ranges if event["name"].startswith(STEP)), key=lambda event: float(event["ts"]))
    if not steps:
        yield f"no {STEP}: the overview has no steps"
    if len(steps) > MOST_ROUNDS:
        yield f"{len(steps)} steps: more than {MOST_ROUNDS} take readers too long"
    names = [step["name"] for step in steps]
    if len(set(names)) < len(names):
        yield "two steps have one number"


def _stop(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
