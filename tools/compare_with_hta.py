"""Compares what HolisticTraceAnalysis makes of a run's traces with what its own records say.

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0 "pandas<3"
    python tools/compare_with_hta.py --hta hta/bin/python [RUN]

HolisticTraceAnalysis has a Python of its own, since it needs an older pandas. Of each trace: for how long (us) the
device stands still, computes, and copies while it does not compute, and the mean bandwidth (GB/s) of each kind of
copies. Exits with 1 if a figure differs by more than one per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from specstream.traces.chrome import COPIES
from specstream.traces.records import RecordedRound
from specstream.traces.run_reader import RunReader, find_runs
from specstream.traces.waits import Interval, tasks_of

EXAMPLE_RUNS = Path(__file__).resolve().parents[1] / "docs" / "example_runs"
MOST = 0.01
TIMES = ("idle", "compute", "exposed copies")
THEIRS = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)
times = trace.get_temporal_breakdown(visualize=False).iloc[0]
points = trace.get_memory_bw_time_series()[0]
speeds = points[points.memory_bw_gbps > 1e-6].groupby("name").memory_bw_gbps.mean()
found = {name: float(times[f"{column}_time(us)"]) for name, column in
    (("idle", "idle"), ("compute", "compute"), ("exposed copies", "non_compute"))}
found |= {name: float(mean) for name, mean in speeds.items()}
print(json.dumps(found))
"""
"""A bandwidth is a sum to which copies are added and taken away again: what rounding leaves of it is none."""


def theirs(python: str, trace: Path) -> dict[str, float]:
    """Times by exact stamps; bandwidths by stamps of whole microseconds, as they are unless told otherwise."""
    found: dict[str, float] = {}
    for exact in ("0", "1"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if exact == "1":
            environment["HTA_DISABLE_NS_ROUNDING"] = "1"
        done = subprocess.run([python, "-c", THEIRS, trace], env=environment, stdout=subprocess.PIPE, check=True)
        read: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        found |= {name: value for name, value in read.items() if (name in TIMES) == (exact == "1")}
    return found


def ours(reader: RunReader, rounds: Iterable[RecordedRound]) -> dict[str, float]:
    """The same figures, from the spans of the rounds."""
    times: dict[bool, list[Interval]] = {True: [], False: []}
    speeds: dict[str, list[float]] = {}
    for recorded in rounds:
        tasks = tasks_of(reader.plan(recorded.plan))
        for span in recorded.spans:
            task, begin, end = tasks[span.task], recorded.start_us + span.start_us, recorded.start_us + span.stop_us
            times[task.kind in COPIES].append((begin, end))
            if task.kind in COPIES and end > begin:
                speeds.setdefault(COPIES[task.kind], []).append(task.bytes / (end - begin) / 1e3)
    everything = times[True] + times[False]
    whole = max(end for _, end in everything) - min(begin for begin, _ in everything)
    busy, compute = covered(everything), covered(times[False])
    found = {"idle": whole - busy, "compute": compute, "exposed copies": busy - compute}
    return found | {name.partition(" (")[0]: fmean(values) for name, values in speeds.items()}


def covered(times: list[Interval]) -> float:
    """How long at least one of the intervals lasts."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(times):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def compare(python: str, run: Path) -> list[dict[str, Any]]:
    """A line for each figure of each of the run's traces."""
    reader, lines = RunReader(run), []
    traces = sorted(run.glob("*.pt.trace.json.gz"))
    firsts = [int(trace.name.split(".")[1]) for trace in traces]
    for trace, first, end in zip(traces, firsts, [*firsts[1:], sys.maxsize], strict=True):
        indices = [summary.index for summary in reader.summaries() if first <= summary.index < end]
        own, other = ours(reader, map(reader.round, indices)), theirs(python, trace)
        for name, value in own.items():
            difference = abs(other[name] / value - 1) if value else abs(other[name])
            lines.append({"trace": trace.name, "figure": name, "ours": value, "theirs": other[name], "by": difference})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder (the one in docs/example_runs)")
    parser.add_argument("--hta", required=True, metavar="PYTHON", help="a Python that has HolisticTraceAnalysis")
    given = parser.parse_args()
    lines = compare(given.hta, given.run or next(iter(find_runs(EXAMPLE_RUNS).values())))
    for line in lines:
        print("{trace:40} {figure:34} {ours:14.3f} {theirs:14.3f} {by:8.3%}".format(**line))
    if not lines or max(line["by"] for line in lines) > MOST:
        sys.exit(f"a figure differs by more than {MOST:.0%}")


if __name__ == "__main__":
    main()
