"""What keeps draft steps beside the target from holding it up: each means taken away, and one more tried.

    python benchmarks/draft_priority.py [--draft qwen3-0.6b|self] [--batch 4] [--context 8192] [--depth 4 16]

Rounds of two cohorts as in `cohorts.py`, for each number of candidates, in engines that differ in one thing:

- as it is: draft steps have the lower priority, and their tables are read from pinned memory by a kernel;
- one priority: the steps' kernels have the target's;
- copied tables: a copy engine brings the tables, as it does histories;
- N processors: the steps' kernels run on that many multiprocessors alone (a green context), the target's on all.

`exposed_ms` is what drafting adds to a round, by the byte that it streams; `draft_ms` what its steps take.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

from specstream import lane_streams, mirror
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_pair import MADE_UP, BenchPair, cohort_options, measured_rounds, place_requests, tokens_of_rounds
from specstream.bench_report import report
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.cuda_executor import CudaExecutor
from specstream.device_copy import Transfer
from specstream.streams import new_stream

PROCESSORS = (32, 64)
"""Of a green context."""
MakeStream = Callable[..., torch.cuda.Stream]


def one_priority(device: torch.device, *, high_priority: bool) -> torch.cuda.Stream:
    return new_stream(device, high_priority=True)


def copy_tables(here: torch.Tensor, there: torch.Tensor) -> None:
    size = here.numel() * here.itemsize
    Transfer(there.data_ptr(), here.data_ptr(), size, True).launch(torch.cuda.current_stream(there.device).cuda_stream)


def streams_on(device: torch.device, processors: int) -> MakeStream:
    """A maker of streams on so many multiprocessors."""
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        error, *results = getattr(driver, name)(*arguments)
        if int(error) != 0:
            raise RuntimeError(f"{name}: {error!r}")
        return results[0] if len(results) == 1 else results

    number = call("cuDeviceGet", device.index or 0)
    whole = call("cuDeviceGetDevResource", number, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, _, _ = call("cuDevSmResourceSplitByCount", 1, whole, 0, processors)
    described = call("cuDevResourceGenerateDesc", [groups[0]], 1)
    context = call("cuGreenCtxCreate", described, number, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)

    def make(device: torch.device, *, high_priority: bool) -> torch.cuda.Stream:
        low, high = torch.cuda.Stream.priority_range()  # type: ignore[no-untyped-call]
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = call("cuGreenCtxStreamCreate", context, flags, high if high_priority else low)
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(int(made), device)
        return stream

    return make


def streams_by(make: MakeStream) -> Any:
    return mock.patch.object(lane_streams, "new_stream", make)


def on_processors(device: torch.device, processors: int) -> Any:
    of_draft = streams_on(device, processors)

    def lane_stream(device: torch.device, *, high_priority: bool) -> torch.cuda.Stream:
        return (new_stream if high_priority else of_draft)(device, high_priority=high_priority)

    return streams_by(lane_stream)


def ways(device: torch.device) -> dict[str, Callable[[], Any]]:
    """By name, what is different while an engine is made and measured."""
    found: dict[str, Callable[[], Any]] = {
        "as it is": nullcontext,
        "one priority": lambda: streams_by(one_priority),
        "copied tables": lambda: mock.patch.object(mirror, "upload", copy_tables),
    }
    for processors in PROCESSORS:
        found[f"{processors} processors"] = partial(on_processors, device, processors)
    return found


def measure_way(pair: BenchPair, depth: int, given: argparse.Namespace) -> dict[str, float]:
    options = cohort_options(given.context, given.batch, depth)
    with closing(pair.engine(**options, **MADE_UP)) as engine:
        place_requests(engine, given.context, tokens_of_rounds(given.rounds, depth))
        on_seconds, on_bytes = measured_rounds(engine, given.rounds, drafts=True)
        executor = engine._executor
        drafts = executor.draft_seconds if isinstance(executor, CudaExecutor) else None
        off_seconds, off_bytes = measured_rounds(engine, given.rounds, drafts=False)
    exposed = on_seconds - off_seconds / off_bytes * on_bytes
    per_round = 1e3 / given.rounds
    return {"round_ms": on_seconds * per_round, "exposed_ms": exposed * per_round, "draft_ms": (drafts or 0.0) * 1e3}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    pair = BenchPair.make(given.target, given.draft, given.context, given.batch, device, max(given.depth))
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, way in ways(device).items():
        found[name] = {}
        for depth in given.depth:
            try:
                with way():
                    found[name][depth] = measure_way(pair, depth, given)
            except Exception as error:  # a driver without green contexts, for example: the other ways are measured
                found[name][depth] = {"error": f"{type(error).__name__}: {error}"}
    return {
        "benchmark": "draft priority",
        "machine": machine(device),
        "versions": versions(),
        "target": pair.target.figures(),
        "draft": given.draft,
        "batch": given.batch,
        "context": given.context,
        "ways": found,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--draft", default="qwen3-0.6b", metavar="PRESET|DIR|self")
    parser.add_argument("--batch", type=positive, default=4, metavar="N", help="requests (4)")
    parser.add_argument("--context", type=positive, default=8_192, metavar="N", help="tokens of each (8192)")
    parser.add_argument("--depth", type=positive, nargs="+", default=[4, 16], help="candidates a round (4 16)")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="measured of each kind (20)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {}
    for name, depths in figures["ways"].items():
        for depth, one in depths.items():
            shown[f"{name}, {depth}"] = one.get("error") or (
                f"{one['round_ms']:.2f} ms a round, {one['exposed_ms']:.2f} exposed of {one['draft_ms']:.2f} of drafts"
            )
    shown["machine"] = figures["machine"]["device"]
    report(f"{given.target} and {given.draft}, {given.batch} x {given.context} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
