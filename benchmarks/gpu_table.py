"""Measures the rows of a table on a CUDA device, one run after the other, and prints each figure beside its bar.

    python benchmarks/gpu_table.py [--rows a,b-1x32K] [--redo] [--limit-seconds 1200] [--file FILE]

Each run is a command: another script of this folder or `specstream bench`, of which those of a target alone run in this
process, one after the other, so that a target is made, captured and compiled once. What a run measures is kept in the
file as soon as it ends, and is not measured again without --redo; rows of one command share its run. The rows of
self-drafting need a model with real weights, which `python benchmarks/smollm2.py --out smollm2` puts into the folder
that this is started in.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specstream.bench_setup import BenchModels

FOLDER = Path(__file__).resolve().parent
DEFAULT_FILE = FOLDER / "results" / "h200.json"


@dataclass(frozen=True)
class Row:
    """One figure of one run."""

    command: str
    """A script of this folder and its arguments, or what follows `specstream bench`."""
    figure: str
    """Its name in the run's JSON."""
    at_least: float | None = None
    at_most: float | None = None
    scale: float = 1.0
    """Factor on the figure before it is shown and compared."""


def bench_round(context: int, batch: int = 1, queries: int = 5, resident: str = "0", more: str = "") -> str:
    shape = f"--context {context} --batch {batch} --queries {queries} --resident {resident}"
    return f"round --target qwen3-8b --dtype bfloat16 {shape} {more}".strip()


K = 1024
GENERATE = "generate --target qwen3-8b --dtype bfloat16"
DRAFTED = "--draft qwen3-0.6b --draft-window 1024 --synthetic-acceptance-length 3"
DRAFT_ALONE = f"generate --target qwen3-0.6b {DRAFTED} --context {4 * K} --resident all --new-tokens 192 --skip-prefill"
RESIDENT = f"resident_baseline.py --context {K}"
COHORTS = {"2x16K": (2, 16 * K), "4x8K": (4, 8 * K), "8x16K": (8, 16 * K)}
DIVERGENCE = "bfloat16_divergence.py --depth 1 4 16"
SELF_DRAFT = "self_draft.py --target smollm2"
SELF_DRAFT_THROUGHPUT = "self_draft_throughput.py --target smollm2 --depth 22 --new-tokens 1024"
ROWS = {
    "a-1x32K": Row(bench_round(32 * K), "link_utilization", at_least=0.98),
    "a-8x16K": Row(bench_round(16 * K, 8), "link_utilization", at_least=0.99),
    "a-4x8K": Row(bench_round(8 * K, 4), "link_utilization", at_least=0.98),
    "a-1x128K": Row(bench_round(128 * K), "link_utilization", at_least=0.99),
    "b-1x32K": Row(bench_round(32 * K, queries=33), "link_utilization", at_least=0.95),
    "b-8x16K": Row(bench_round(16 * K, 8, queries=33), "link_utilization", at_least=0.95),
    "b-4x8K": Row(bench_round(8 * K, 4, queries=33), "link_utilization", at_least=0.95),
    "b-1x128K": Row(bench_round(128 * K, queries=33), "link_utilization", at_least=0.95),
    "c-1x32K": Row(bench_round(32 * K, resident="0.5"), "link_utilization", at_least=0.95),
    "c-8x16K": Row(bench_round(16 * K, 8, resident="0.5"), "link_utilization", at_least=0.95),
    "d-1x32K": Row(
        f"{GENERATE} --draft none --context {32 * K} --new-tokens 128 --skip-prefill", "link_utilization", at_least=0.96
    ),
    "e-1x32K": Row(bench_round(32 * K), "launch_ms", at_most=1.0),
    "e-8x16K": Row(bench_round(16 * K, 8), "launch_ms", at_most=1.0),
    "e-4x8K": Row(bench_round(8 * K, 4), "launch_ms", at_most=1.0),
    "e-1x128K": Row(bench_round(128 * K), "launch_ms", at_most=1.0),
    "f-1x32K": Row(bench_round(32 * K, more="--commit-every 4"), "slowest_changed_over_median", at_most=1.05),
    "g-graph": Row(RESIDENT, "over_graph", at_most=1.03),
    "g-weights": Row(RESIDENT, "over_weights", at_most=1.43),
    "h-8x32K": Row(f"attention_kernels.py --shape 8x{32 * K}x5", "over_copy", at_most=1.5),
    "i-draft": Row(f"{DRAFT_ALONE} --temperature 0.8 --top-p 0.9", "draft_step_ms", at_most=1.25),
    "j-32K": Row(f"prefill_baseline.py --context {32 * K}", "over_resident", at_most=1.15),
    "j-128K": Row(f"prefill_baseline.py --context {128 * K}", "over_resident", at_most=1.15),
    "k-1x32K": Row(bench_round(32 * K), "peak_device_bytes", scale=1 / K**3),
    "k-1x128K": Row(
        f"{GENERATE} {DRAFTED} --context {128 * K} --new-tokens 64 --memory-cap 22GiB",
        "peak_device_bytes",
        at_most=22,
        scale=1 / K**3,
    ),
    "l-1x32K": Row(f"offloaded_baseline.py --context {32 * K}", "times_faster", at_least=7),
    "l-first": Row(f"offloaded_baseline.py --context {32 * K}", "times_faster_at_first", at_least=7),
    "l-link": Row(f"offloaded_baseline.py --context {32 * K}", "over_link", at_most=1.02),
    "n-logits": Row(DIVERGENCE, "streamed_difference"),
    "n-texts": Row(DIVERGENCE, "beyond_near_ties", at_most=0),
    **{
        f"cohorts-{figure}-{name}": Row(f"cohorts.py --batch {batch} --context {context}", field, at_most=bar)
        for figure, field, bar in (("exposed", "exposed", 0.02), ("round", "on_over_off", 1.02))
        for name, (batch, context) in COHORTS.items()
    },
    **{
        f"one-{figure}-{name}": Row(f"one_request.py --draft {draft} --ways short {way}", field, at_most=bar)
        for figure, way, field, bar in (
            ("lookahead", "lookahead", "lookahead_over_short", 0.35),
            ("hits", "lookahead", "hit_rate_error", 0.03),
            ("ring", "long", "long_over_short", 0.35),
        )
        for name, draft in (("second", "qwen3-0.6b"), ("self", "self"))
    },
    **{
        f"grid-{figure}-{context}K": Row(
            f"grid.py --context {context * K}" + (" --batch 1 2 4" if context == 128 else ""), field, **bar
        )
        for context in (8, 16, 32, 64, 128)
        for figure, field, bar in (
            ("predicted", "worst_prediction", {"at_most": 0.05}),
            ("tokens", "least_over_sequential", {"at_least": 0.99}),
        )
    },
    "useless": Row("useless_draft.py", "over_off", at_least=0.97),
    "useless-rounds": Row("useless_draft.py", "rounds_until_off", at_most=16),
    **{
        f"cohorts-link-{name}": Row(
            f"{GENERATE} {DRAFTED} --drafting cohorts --batch {batch} --context {context} --new-tokens 256 "
            "--skip-prefill",
            "link_utilization",
            at_least=0.95,
        )
        for name, (batch, context) in COHORTS.items()
    },
    **{
        f"tune-{figure}-{name}": Row(f"tuned_over_grid.py --batch {batch} --context {context}", field, **bar)
        for name, (batch, context) in {"1x32K": (1, 32 * K), "8x8K": (8, 8 * K)}.items()
        for figure, field, bar in (
            ("grid", "tuned_over_grid", {"at_least": 0.98}),
            ("untuned", "untuned_over_grid", {"at_least": 0.93}),
            ("seconds", "tuning_seconds", {"at_most": 90}),
        )
    },
    "memory": Row("peak_memory.py", "worst_error", at_most=0.03),
    "trace": Row("trace_overhead.py", "overhead", at_most=0.02),
    "self-acceptance": Row(SELF_DRAFT, "acceptance", at_least=0.88),
    "self-texts": Row(SELF_DRAFT, "beyond_near_ties", at_most=0),
    "self-off": Row(SELF_DRAFT_THROUGHPUT, "over_off", at_least=3),
    "self-sequential": Row(SELF_DRAFT_THROUGHPUT, "over_sequential", at_least=1.3),
}
"""Link utilization but for: e and i in ms, k in GiB, n-logits a difference of logits, n-texts and self-texts counts,
self-acceptance a chance, memory and trace shares; f, g, h, j, l, of cohorts exposed and round, tune but for its
seconds, self-off and self-sequential are quotients."""


def chosen(names: str | None) -> dict[str, Row]:
    """Rows by name or first letter; all for None."""
    wanted = names.split(",") if names else list(ROWS)
    for name in wanted:
        if not any(name in (row, row.split("-")[0]) for row in ROWS):
            raise SystemExit(f"--rows: no row {name!r}; the rows are {', '.join(ROWS)}")
    return {name: row for name, row in ROWS.items() if name in wanted or name.split("-")[0] in wanted}


def read(file: Path) -> dict[str, Any]:
    """The file, with its runs by command."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {"runs": {}} | kept


def keep(file: Path, command: str, result: dict[str, Any]) -> None:
    """Adds a run to the file, in one step, so that an interrupt leaves it whole."""
    kept = read(file)
    kept["runs"][command] = result
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def python_arguments(command: str) -> list[str]:
    """What Python is started with for a row's command."""
    first, *rest = command.split()
    return [str(FOLDER / first), *rest] if first.endswith(".py") else ["-m", "specstream", "bench", first, *rest]


class Runner:
    """Runs commands."""

    def __init__(self) -> None:
        self._models: BenchModels | None = None

    def measure(self, command: str) -> dict[str, Any]:
        """A command's figures, or what it said when it failed under "error"."""
        of_target_alone = command.startswith("round ") or "--draft none" in command
        if of_target_alone and "--memory-cap" not in command:
            return self._here(command)
        if self._models is not None:  # which holds memory of the device
            self._models.forget()
        return in_own_process(command)

    def _here(self, command: str) -> dict[str, Any]:
        from specstream import bench_generate, bench_round, cli
        from specstream.bench_report import Progress, report
        from specstream.bench_setup import BenchModels

        self._models = self._models or BenchModels()
        benchmark = bench_round if command.startswith("round ") else bench_generate
        try:
            given = cli.make_parser().parse_args(["bench", *command.split()])
            figures = benchmark.measure(given, Progress(), self._models)
        except Exception as error:
            self._models.forget()
            return {"error": f"{type(error).__name__}: {error}"}
        report(command, benchmark.table_rows(figures), figures, None)
        return figures


def in_own_process(command: str) -> dict[str, Any]:
    """Runs a command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        asked = [sys.executable, *python_arguments(command), "--json", str(figures)]
        done = subprocess.run(asked, env=os.environ | {"PYTHONSAFEPATH": "1"}, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            result: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
            return result
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}


def table(rows: dict[str, Row], runs: dict[str, dict[str, Any]]) -> str:
    """The rows as a markdown table."""
    lines = ["| row | figure | | bar | met |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        run = runs.get(row.command)
        value = (run or {}).get(row.figure)
        shown = f"{value * row.scale:.4g}" if value is not None else _missing(run)
        lines.append(f"| {name} | {row.figure} | {shown} | {_bar(row)} | {_met(row, value)} |")
    return "\n".join(lines)


def _missing(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not run"
    return f"failed: {run['error']}" if "error" in run else "not known"


def _bar(row: Row) -> str:
    bars = [f">= {row.at_least:.4g}"] if row.at_least is not None else []
    bars += [f"<= {row.at_most:.4g}"] if row.at_most is not None else []
    return " and ".join(bars) or "none"


def _met(row: Row, value: float | None) -> str:
    if value is None or (row.at_least is None and row.at_most is None):
        return ""
    scaled = value * row.scale
    above = row.at_least is None or scaled >= row.at_least
    return "yes" if above and (row.at_most is None or scaled <= row.at_most) else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="NAMES", help="rows or their letters, with commas (all)")
    parser.add_argument("--redo", action="store_true", help="measure also what the file has")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--file", type=Path, default=DEFAULT_FILE, help=f"for the results ({DEFAULT_FILE.name})")
    arguments = parser.parse_args()
    rows, runner, started = chosen(arguments.rows), Runner(), time.monotonic()
    for command in dict.fromkeys(row.command for row in rows.values()):
        known = read(arguments.file)["runs"].get(command, {"error": ""})
        if "error" not in known and not arguments.redo:
            continue
        if time.monotonic() - started > arguments.limit_seconds:
            print(f"--limit-seconds: not begun: {command}", file=sys.stderr)
            continue
        print("\n" + " ".join(["python", *python_arguments(command)]), flush=True)
        result = runner.measure(command)
        if "error" in result:
            print(f"failed: {result['error']}", file=sys.stderr)
        if "error" not in result or "error" in known:
            keep(arguments.file, command, result)
    print("\n" + table(rows, read(arguments.file)["runs"]))


if __name__ == "__main__":
    main()
