"""What the benchmarks print: progress on stderr while they work, then a table of figures, or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from specstream.exposure import exposure
from specstream.options import format_size
from specstream.planner import Planner
from specstream.policy import mean_round_us
from specstream.round_plan import Lane
from specstream.round_spec import RoundSpec

UNFOLDED = 10_000
"""Columns of what is not printed on a terminal: a path stays in one line."""


class Progress:
    """Says on stderr what is going on, if that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        if self._console.is_terminal:
            with self._console.status(text):
                yield
        else:
            yield

    @contextmanager
    def listed(self, text: str) -> Iterator[Callable[[str, str], None]]:
        """Shows a text; what is yielded prints a line above it, and shows another one."""
        with self._console.status(text) as status:

            def say(line: str, then: str) -> None:
                if self._console.is_terminal:
                    self._console.print(line, highlight=False, markup=False, soft_wrap=True)
                    status.update(then)

            yield say

    def counted(self, numbers: Iterable[int], text: str) -> Iterable[int]:
        """The numbers, with a bar."""
        return track(numbers, text, console=self._console, transient=True, disable=not self._console.is_terminal)


def report(title: str, rows: dict[str, str], figures: dict[str, Any], file: str | None) -> None:
    """Prints the rows, and writes all figures to `file`; with a file of "-" prints the figures instead."""
    text = json.dumps(figures, indent=2)
    if file == "-":
        print(text)
        return
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNFOLDED
    console.print(table)
    if file is not None:
        Path(file).write_text(text + "\n", encoding="utf-8")


def milliseconds(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f} ms" if value < 10 else f"{value:.2f} ms"


def link_use(figures: dict[str, Any]) -> str:
    link = f"{figures['link_bytes_per_second'] / 1e9:.1f} GB/s"
    used = figures["link_utilization"]
    return f"none: nothing streams (the link: {link})" if used is None else f"{used:.4f} of {link}"


def memory_rows(figures: dict[str, Any]) -> dict[str, str]:
    """Of memory and the machine, which both benchmarks report."""
    planned = f"{format_size(figures['planned_device_bytes'])} planned"
    peaks = [figures[name] for name in ("peak_device_bytes", "setup_peak_device_bytes")]
    return {
        "chunks": f"{figures['chunk_tokens']} tokens, {figures['group_chunks']} a group, "
        f"{figures['staging_slots']} slots",
        "device memory": planned
        if None in peaks
        else f"{format_size(peaks[0])} at most, {format_size(peaks[1])} while it was set up; {planned}",
        "machine": f"{figures['machine']['device']}, torch {figures['versions']['torch']}",
    }


def prediction(planner: Planner, spec: RoundSpec, missed: float = 0.0) -> dict[str, Any]:
    """A round of this structure in steady state, how long each lane is busy in it, and what drafting costs it.

    With lookahead, where `missed` is the share of outcomes that had no branch, the round is the mean of all.
    """
    drafts = exposure(planner.exact(spec), Lane.DRAFT)
    timeline = drafts.timeline
    busy = {lane.value: timeline.busy_us(lane) / 1e3 for lane in Lane}
    times = {"round": mean_round_us(planner, spec, missed) / 1e3} | {name: ms for name, ms in busy.items() if ms}
    if spec.draft_steps:
        times["exposed draft"] = drafts.exposed_us / 1e3
    return {"profile": planner.profile.title, "predicted_ms": times}


def predicted(figures: dict[str, Any]) -> str:
    """The `prediction` among a run's figures, in a line."""
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in figures["predicted_ms"].items())
    return f"{parts}, for the profile {figures['profile']}"
