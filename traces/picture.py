"""A round as a picture: what the tab in TensorBoard shows of it, for a page or a message. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specstream.errors import MissingExtra

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError as error:
    raise MissingExtra("pictures of rounds", "matplotlib", "tensorboard") from error

from specstream.traces.figures import RoundFigures, measured_figures, planned_figures
from specstream.traces.records import PlannedRound, RecordedRound, RunInfo
from specstream.traces.waits import (
    DRAFT,
    TARGET,
    Interval,
    exposed_draft,
    measured_drafting,
    measured_waits,
    planned_drafting,
    planned_waits,
    tasks_of,
)

COLORS = {"target": "#0072B2", "link": "#E69F00", "store": "#009E73", "draft": "#CC79A7"}
"""Of lanes: those of plugin/static/theme.js."""
OTHER_COLOR, EXPOSED, ROW = "#56B4E9", "#D55E00", "#f4f4f4"
WAITS: dict[str, Any] = {"facecolor": "#e0e0e0", "edgecolor": "#757575", "hatch": "/////"}
IS_EXPOSED: dict[str, Any] = {"facecolor": "none", "edgecolor": EXPOSED, "hatch": r"\\\\"}
WIDTH, ROW_HEIGHT, OTHER_HEIGHT = 9.6, 0.34, 1.6
"""In inches: of the picture, of a row, and of what is above and below the rows."""
PIXELS_PER_INCH = 180
LEAST_WIDTH = 0.4
"""Of a task, in points: one pixel."""


def save_picture(path: str | Path, planned: PlannedRound, info: RunInfo, recorded: RecordedRound | None = None) -> None:
    """Draws a plan's round into a PNG file, lane by lane; with a measured round of it, each below what was planned.

    Args:
        info: of the run.
        recorded: a round of this plan.

    Raises:
        ValueError: the round is of another plan.
        OSError: the file cannot be written.
    """
    figure = round_figure(planned, info, recorded)
    figure.savefig(path, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})


def round_figure(planned: PlannedRound, info: RunInfo, recorded: RecordedRound | None = None) -> Figure:
    """The same as matplotlib's figure. Times are in ms.

    Raises:
        ValueError: the round is of another plan.
    """
    if recorded is not None and recorded.plan != planned.id:
        raise ValueError(f"round {recorded.index} is one of plan {recorded.plan}, and not of plan {planned.id}")
    rows = list(_rows(planned, info, recorded))
    figure = Figure(figsize=(WIDTH, OTHER_HEIGHT + ROW_HEIGHT * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        _draw(axes, row, place)
    expected = planned_figures(planned, info)
    measured = measured_figures(recorded, planned, info) if recorded is not None else None
    lines = _mark_ends(axes, expected, measured)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.005)
    axes.set_xlabel("ms from the start of the round", fontsize=9)
    axes.tick_params(labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(_title(info, measured or expected, recorded), loc="left", fontsize=10)
    legend = [*_legend({row.lane: _color(row.lane) for row in rows}), *lines]
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    return figure


@dataclass(frozen=True)
class _Row:
    """A lane, planned or measured."""

    lane: str
    label: str
    pale: bool
    """What was planned, above what was measured."""
    tasks: list[tuple[float, float, int]]
    """Start, stop, and layer."""
    waits: list[Interval]
    exposed: list[Interval]


def _rows(planned: PlannedRound, info: RunInfo, recorded: RecordedRound | None) -> Iterator[_Row]:
    """Of each lane that has tasks the planned row, then the measured one if tasks were measured."""
    named = tasks_of(planned)
    waits = planned_waits(planned)
    tasks = [(task, task.start_us, task.stop_us) for task in planned.tasks]
    kinds = [("planned", tasks, waits, exposed_draft(planned_drafting(planned), waits))]
    if recorded is not None and recorded.spans:
        waits = measured_waits(recorded, planned)
        tasks = [(named[span.task], span.start_us, span.stop_us) for span in recorded.spans]
        kinds.append(("measured", tasks, waits, exposed_draft(measured_drafting(recorded, planned), waits)))
    for lane in info.lanes:
        for kind, tasks, waits, exposed in kinds:
            own = [(start, stop, task.layer) for task, start, stop in tasks if task.lane == lane]
            if own or any(task.lane == lane for task in planned.tasks):
                waited = [(wait.start_us, wait.stop_us) for wait in waits] if lane == TARGET else []
                label = lane if len(kinds) == 1 else f"{lane}, {kind}"
                pale = len(kinds) > 1 and kind == "planned"
                yield _Row(lane, label, pale, own, waited, exposed if lane == DRAFT else [])


def _draw(axes: Axes, row: _Row, place: int) -> None:
    """One row, from the back to the front."""
    band = place - 0.42, 0.84
    axes.axhspan(band[0], band[0] + band[1], color=ROW, zorder=0)
    axes.broken_barh(_ms(row.waits), band, zorder=1, gid=f"{row.label}: waits", linewidth=0, **WAITS)
    for odd in (False, True):  # layers by turns lighter and darker
        times = [(start, stop) for start, stop, layer in row.tasks if bool(layer % 2) == odd]
        alpha = (0.65 if row.pale else 1.0) - (0.15 if odd else 0.0)
        name = f"{row.label}: {'odd' if odd else 'even'} layers"
        color = _color(row.lane)
        axes.broken_barh(_ms(times), band, color=color, alpha=alpha, linewidth=LEAST_WIDTH, zorder=2, gid=name)
    axes.broken_barh(_ms(row.exposed), band, zorder=3, gid=f"{row.label}: exposed", linewidth=1.5, **IS_EXPOSED)


def _mark_ends(axes: Axes, planned: RoundFigures, measured: RoundFigures | None) -> list[Line2D]:
    """Lines at the end of the round and where it would end if the link did nothing but bring its bytes."""
    ends = [("round, planned", planned.duration_us, "#212121", "--")]
    if measured is not None:
        ends.append(("round, measured", measured.duration_us, "#212121", "-"))
    if (floor := (measured or planned).link_floor_us) is not None:
        ends.append(("link alone", floor, "#8a5a00", ":"))
    return [
        axes.axvline(us / 1e3, color=color, linestyle=style, linewidth=1.4, zorder=4, label=f"{name}: {_time(us)}")
        for name, us, color, style in ends
    ]


def _legend(lanes: dict[str, str]) -> list[Patch]:
    return [
        *(Patch(color=color, label=lane) for lane, color in lanes.items()),
        Patch(label="the target waits", **WAITS),
        Patch(label="exposed draft", **IS_EXPOSED),
    ]


def _title(info: RunInfo, figures: RoundFigures, recorded: RecordedRound | None) -> str:
    draft = f" with {info.draft}" if info.draft else ""
    parts = ["as planned" if recorded is None else f"round {recorded.index}"]
    if figures.link_utilization is not None:
        parts.append(f"link utilization {figures.link_utilization:.0%}")
    if figures.bubbles_us is not None:
        filled = "" if figures.bubble_fill is None else f", {figures.bubble_fill:.0%} filled by the draft"
        parts.append(f"target waits {_time(figures.bubbles_us)}{filled}")
    if figures.exposed_draft_us is not None:
        parts.append(f"exposed draft {_time(figures.exposed_draft_us)}")
    return f"{info.target}{draft}: {parts[0]}\n{'; '.join(parts[1:])}"


def _ms(times: Iterable[Interval]) -> list[tuple[float, float]]:
    """Starts and lengths."""
    return [(start / 1e3, (stop - start) / 1e3) for start, stop in times]


def _color(lane: str) -> str:
    return COLORS.get(lane, OTHER_COLOR)


def _time(us: float) -> str:
    return f"{us:.0f} us" if us < 1e3 else f"{us / 1e3:.1f} ms"
