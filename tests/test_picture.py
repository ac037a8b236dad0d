"""Pictures of rounds: what is drawn is what the records say, and what the tab in TensorBoard shows."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from specstream.errors import MissingExtra, SpecStreamError
from specstream.traces import picture
from specstream.traces.figures import planned_figures
from specstream.traces.picture import COLORS, EXPOSED, OTHER_COLOR, round_figure, save_picture
from specstream.traces.records import PlannedRound, RecordedRound
from specstream.traces.waits import (
    exposed_draft,
    measured_drafting,
    measured_waits,
    planned_drafting,
    planned_waits,
)
from tests.run_folders import planned_round, recorded_round, run_info
from tests.trace_cases import INFO as TOY_INFO
from tests.trace_cases import toy_plan, toy_round

INFO = run_info()
PLAN = planned_round(layers=3, groups=4)
ROUND = recorded_round(PLAN, 3, slower=1.5)
KINDS = ("planned", "measured")
Intervals = list[tuple[float, float]]


def drawn(figure: Figure, name: str) -> Any:
    """Start and stop, in us, of the bars of that name, in order; and how they are drawn."""
    (bars,) = (each for each in figure.axes[0].collections if each.get_gid() == name)
    assert isinstance(bars, PolyCollection)
    edges = [path.get_extents() for path in bars.get_paths()]
    return sorted((1e3 * each.x0, 1e3 * each.x1) for each in edges), bars


def times(figure: Figure, name: str) -> Intervals:
    found: Intervals = drawn(figure, name)[0]
    return found


def near(intervals: Any) -> Any:
    return [pytest.approx(each, abs=1e-6) for each in sorted(intervals)]


def tasks_drawn(figure: Figure, label: str) -> Intervals:
    return sorted(each for kind in ("even", "odd") for each in times(figure, f"{label}: {kind} layers"))


def labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize(("plan", "info"), [(PLAN, INFO), (toy_plan(), TOY_INFO)])
def test_every_planned_task_is_drawn_on_its_lane(plan: PlannedRound, info: Any) -> None:
    figure = round_figure(plan, info)
    lanes = [lane for lane in info.lanes if any(task.lane == lane for task in plan.tasks)]
    assert labels(figure) == lanes
    for lane in lanes:
        for odd in (False, True):
            own = [(t.start_us, t.stop_us) for t in plan.tasks if t.lane == lane and bool(t.layer % 2) == odd]
            found, bars = drawn(figure, f"{lane}: {'odd' if odd else 'even'} layers")
            assert found == near(own)
            assert not own or to_hex(bars.get_facecolor()[0]).upper() == COLORS[lane]
    waits = planned_waits(plan)
    assert times(figure, "target: waits") == near((wait.start_us, wait.stop_us) for wait in waits)
    assert times(figure, "draft: exposed") == near(exposed_draft(planned_drafting(plan), waits))


def test_measured_rows_are_below_the_planned_ones() -> None:
    figure = round_figure(PLAN, INFO, ROUND)
    assert labels(figure) == [f"{lane}, {kind}" for lane in ("target", "link", "draft") for kind in KINDS]
    for lane in ("target", "link", "draft"):
        tasks = [task for task in PLAN.tasks if task.lane == lane]
        assert tasks_drawn(figure, f"{lane}, planned") == near((t.start_us, t.stop_us) for t in tasks)
        assert tasks_drawn(figure, f"{lane}, measured") == near((1.5 * t.start_us, 1.5 * t.stop_us) for t in tasks)
    waits = measured_waits(ROUND, PLAN)
    assert times(figure, "target, measured: waits") == near((wait.start_us, wait.stop_us) for wait in waits)
    exposed = exposed_draft(measured_drafting(ROUND, PLAN), waits)
    assert exposed
    assert times(figure, "draft, measured: exposed") == near(exposed)
    pale, strong = (drawn(figure, f"link, {kind}: even layers")[1].get_alpha() for kind in KINDS)
    assert pale < strong == 1.0


def lines(figure: Figure) -> dict[str, float]:
    """Of the vertical lines in the picture: where they are, in us, by what the legend says of them."""
    found: Any = figure.axes[0].lines
    return {line.get_label(): 1e3 * line.get_xdata()[0] for line in found}


def test_the_ends_and_the_link_floor_are_marked() -> None:
    floor = planned_figures(PLAN, INFO).link_floor_us
    assert lines(round_figure(PLAN, INFO)) == {
        f"round, planned: {PLAN.period_us:.0f} us": PLAN.period_us,
        f"link alone: {floor:.0f} us": floor,
    }
    measured = lines(round_figure(PLAN, INFO, ROUND))
    assert measured[f"round, measured: {ROUND.duration_us:.0f} us"] == pytest.approx(ROUND.duration_us)
    assert not any("alone" in name for name in lines(round_figure(replace(PLAN, link_floor_us=0.0), INFO)))


def test_the_legend_says_what_is_what() -> None:
    figure = round_figure(PLAN, INFO)
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said[:5] == ["target", "link", "draft", "the target waits", "exposed draft"]
    assert said[5:] == list(lines(figure))
    waits, exposed = drawn(figure, "target: waits")[1], drawn(figure, "draft: exposed")[1]
    assert waits.get_hatch() != exposed.get_hatch()
    assert None not in (waits.get_hatch(), exposed.get_hatch())


def test_a_round_that_was_measured_as_a_whole_has_its_end_alone() -> None:
    figure = round_figure(PLAN, INFO, recorded_round(PLAN, 3, slower=1.5, spans=False))
    assert labels(figure) == ["target", "link", "draft"]
    assert ROUND.duration_us in lines(figure).values()


def test_a_lane_without_tasks_is_left_out_and_a_lane_of_a_later_version_drawn() -> None:
    plan = replace(PLAN, tasks=(*PLAN.tasks, replace(PLAN.tasks[0], name="new", lane="later")))
    info = replace(INFO, lanes=(*INFO.lanes, "later"))
    figure = round_figure(plan, info)
    assert labels(figure) == ["target", "link", "draft", "later"]
    assert to_hex(drawn(figure, "later: even layers")[1].get_facecolor()[0]).upper() == OTHER_COLOR


@pytest.mark.parametrize(("plan", "info", "recorded"), [(PLAN, INFO, ROUND), (toy_plan(), TOY_INFO, None)])
def test_a_png_is_written_that_has_all_of_it(
    tmp_path: Path, plan: PlannedRound, info: Any, recorded: RecordedRound | None
) -> None:
    path = tmp_path / "round.png"
    save_picture(path, plan, info, recorded)
    pixels = imread(str(path))
    height, width, _ = pixels.shape
    assert width == round(picture.WIDTH * picture.PIXELS_PER_INCH)
    assert path.stat().st_size < 250_000
    found = {to_hex(each).upper() for each in {tuple(pixel) for pixel in pixels[:, :, :3].reshape(-1, 3)[::3]}}
    wanted = {COLORS[task.lane] for task in plan.tasks}
    assert wanted <= found
    figure = round_figure(plan, info, recorded)
    figure.canvas.draw()
    title, picture_box = figure.axes[0].title.get_window_extent(), figure.bbox
    assert picture_box.x0 <= title.x0
    assert title.x1 <= picture_box.x1
    figure_legend = figure.legends[0].get_window_extent()
    assert picture_box.x0 <= figure_legend.x0
    assert figure_legend.x1 <= picture_box.x1
    save_picture(tmp_path / "again.png", plan, info, recorded)
    assert (tmp_path / "again.png").read_bytes() == path.read_bytes()


def test_colors_are_those_of_the_tab(root: Path) -> None:
    text = (root / "traces" / "plugin" / "static" / "theme.js").read_text()
    assert dict(re.findall(r'(\w+): \{ fill: "(#\w+)"', text)) == COLORS
    assert f'OTHER_LANE = {{ fill: "{OTHER_COLOR}"' in text
    assert f'EXPOSED = "{EXPOSED}"' in text


def test_a_round_of_another_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="round 2 is one of plan 0, and not of plan 1"):
        round_figure(toy_plan(1), TOY_INFO, toy_round(2, toy_plan()))


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "specstream.traces.picture")
    with pytest.raises(MissingExtra, match=r'pip install "specstream\[tensorboard\]"') as refused:
        __import__("specstream.traces.picture")
    assert isinstance(refused.value, SpecStreamError)
    assert isinstance(refused.value, ImportError)
