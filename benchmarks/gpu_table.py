"""Measures the rows of a table on a CUDA device, one run after the other, and prints each figure beside its bar.

    python benchmarks/gpu_table.py [--rows a,b-1x32K] [--redo] [--limit-seconds 1200] [--file FILE]

Each run is a `specstream bench` command in a process of its own. What it measures is kept in the file as soon as it
ends, and is not measured again without --redo; rows of one command share its run. A row that is compared with
something measured elsewhere finds that under "baselines" in the file, by the row's name.
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
from typing import Any

DEFAULT_FILE = Path(__file__).resolve().parent / "results" / "h200.json"


@dataclass(frozen=True)
class Row:
    """One figure of one run."""

    command: str
    """What follows `specstream bench`."""
    figure: str
    """Its name in the run's JSON."""
    at_least: float | None = None
    at_most: float | None = None
    scale: float = 1.0
    """Factor on the figure before it is shown and compared."""
    baseline_factor: float | None = None
    """The figure is to be at most this times the row's baseline."""


def bench_round(context: int, batch: int = 1, queries: int = 5, resident: str = "0", more: str = "") -> str:
    shape = f"--context {context} --batch {batch} --queries {queries} --resident {resident}"
    return f"round --target qwen3-8b --dtype bfloat16 {shape} {more}".strip()


K = 1024
GENERATE = "generate --target qwen3-8b --dtype bfloat16"
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
    "f-1x32K": Row(bench_round(32 * K, more="--commit-every 4"), "slowest_changed_over_median", at_most=1.05),
    "g-1x1K": Row(bench_round(K, queries=1, resident="all"), "round_ms", baseline_factor=1.0),
    "h-8x32K": Row(bench_round(32 * K, 8, resident="all"), "round_ms", baseline_factor=1.0),
    "k-1x32K": Row(bench_round(32 * K), "peak_device_bytes", scale=1 / K**3),
}
"""Link utilization but for: e, h, g in ms; f, a quotient; k in GiB."""


def chosen(names: str | None) -> dict[str, Row]:
    """Rows by name or first letter; all for None."""
    wanted = names.split(",") if names else list(ROWS)
    for name in wanted:
        if not any(name in (row, row.split("-")[0]) for row in ROWS):
            raise SystemExit(f"--rows: no row {name!r}; the rows are {', '.join(ROWS)}")
    return {name: row for name, row in ROWS.items() if name in wanted or name.split("-")[0] in wanted}


def read(file: Path) -> dict[str, Any]:
    """The file's runs by command, and its baselines by row."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {"runs": {}, "baselines": {}} | kept


def keep(file: Path, command: str, result: dict[str, Any]) -> None:
    """Adds a run to the file, in one step, so that an interrupt leaves it whole."""
    kept = read(file)
    kept["runs"][command] = result
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def measure(command: str) -> dict[str, Any]:
    """Runs a command; its figures, or what it said when it failed under "error"."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        asked = [sys.executable, "-m", "specstream", "bench", *command.split(), "--json", str(figures)]
        done = subprocess.run(asked, env=os.environ | {"PYTHONSAFEPATH": "1"}, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            result: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
            return result
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}


def table(rows: dict[str, Row], kept: dict[str, Any]) -> str:
    """The rows as a markdown table."""
    lines = ["| row | figure | | bar | met |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        run, bar = kept["runs"].get(row.command), _bar(name, row, kept["baselines"])
        value = (run or {}).get(row.figure)
        shown = f"{value * row.scale:.4g}" if value is not None else _missing(run)
        lines.append(f"| {name} | {row.figure} | {shown} | {bar} | {_met(name, row, value, kept['baselines'])} |")
    return "\n".join(lines)


def _missing(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not run"
    return f"failed: {run['error']}" if "error" in run else "not known"


def _limits(name: str, row: Row, baselines: dict[str, float]) -> tuple[float | None, float | None]:
    if row.baseline_factor is not None and name in baselines:
        return row.at_least, row.baseline_factor * baselines[name]
    return row.at_least, row.at_most


def _bar(name: str, row: Row, baselines: dict[str, float]) -> str:
    least, most = _limits(name, row, baselines)
    bars = [f">= {least:.4g}"] if least is not None else []
    bars += [f"<= {most:.4g}"] if most is not None else []
    return " and ".join(bars) or ("no baseline yet" if row.baseline_factor is not None else "none")


def _met(name: str, row: Row, value: float | None, baselines: dict[str, float]) -> str:
    least, most = _limits(name, row, baselines)
    if value is None or (least is None and most is None):
        return ""
    scaled = value * row.scale
    return "yes" if (least is None or scaled >= least) and (most is None or scaled <= most) else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="NAMES", help="rows or their letters, with commas (all)")
    parser.add_argument("--redo", action="store_true", help="measure also what the file has")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--file", type=Path, default=DEFAULT_FILE, help=f"for the results ({DEFAULT_FILE.name})")
    arguments = parser.parse_args()
    rows, started = chosen(arguments.rows), time.monotonic()
    for command in dict.fromkeys(row.command for row in rows.values()):
        known = read(arguments.file)["runs"].get(command, {"error": ""})
        if "error" not in known and not arguments.redo:
            continue
        if time.monotonic() - started > arguments.limit_seconds:
            print(f"--limit-seconds: not begun: {command}", file=sys.stderr)
            continue
        print(f"\nspecstream bench {command}", flush=True)
        result = measure(command)
        if "error" in result:
            print(f"failed: {result['error']}", file=sys.stderr)
        if "error" not in result or "error" in known:
            keep(arguments.file, command, result)
    print("\n" + table(rows, read(arguments.file)))


if __name__ == "__main__":
    main()
