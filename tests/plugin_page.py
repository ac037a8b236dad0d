"""Handles for the page of the plugin for TensorBoard, in a browser that selenium drives, and how it writes figures."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from specstream.options import format_size


class Page:
    """The plugin's frame."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def element(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.element(name).text

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def until(self, holds: Callable[[], Any]) -> None:
        WebDriverWait(self.browser, 10, poll_frequency=0.02).until(lambda _: holds())

    def open_run(self, name: str) -> None:
        Select(self.element("run")).select_by_value(name)
        self.until(lambda: self.text("status") == "" and self.table("info", 0)[0] == [name])

    def round(self) -> int:
        return int(self.element("round").get_property("value"))  # type: ignore[arg-type]

    def table(self, name: str, heads: int = 1) -> tuple[list[str], dict[str, list[str]]]:
        """Its heads, and the cells of each row by the field or the name that the row has."""
        script = """
            const cells = (row) => [...row.cells].map((cell) => cell.textContent);
            const table = document.getElementById(arguments[0]);
            return [cells(table.tHead?.rows[0] ?? {cells: []}),
                    [...(table.tBodies[0]?.rows ?? [])].map((row) => [row.dataset.field ?? null, ...cells(row)])];
        """
        found, rows = self.run(script, name)
        return found[1:], {row[0] or row[1]: row[2:] for row in rows}

    def press(self, *keys: str) -> None:
        """In the timeline."""
        self.element("canvas").send_keys("".join(keys))

    def point_at(self, row: str, us: float) -> None:
        """Moves the pointer to a time on a row, which is in view."""
        canvas = self.element("canvas")
        start, stop = self.view()
        width, height = self.run("return [arguments[0].clientWidth, arguments[0].clientHeight]", canvas)
        x = (us - start) / (stop - start) * width - width / 2
        ActionChains(self.browser, duration=0).move_to_element_with_offset(
            canvas, round(x), round(self.middle(row) - height / 2)
        ).perform()

    def middle(self, row: str) -> float:
        """Of a row's height, in the canvas."""
        script = """
            const labels = [...document.querySelectorAll('#labels div')];
            const label = labels.find((each) => each.textContent === arguments[0]);
            return label.offsetTop + label.offsetHeight / 2;
        """
        return float(self.run(script, row))

    def view(self) -> tuple[float, float]:
        """The part of the round that is on the screen, in us, as it is written there."""
        words = self.text("range").split()  # showing 0.0 us to 1.2 ms
        scale = {"us": 1.0, "ms": 1e3}
        return float(words[1]) * scale[words[2]], float(words[4]) * scale[words[5]]

    def colors(self, row: str) -> set[tuple[int, ...]]:
        """Of the pixels along the middle of a row."""
        script = """
            const canvas = document.getElementById('canvas');
            const y = Math.round(arguments[0] * window.devicePixelRatio);
            return [...canvas.getContext('2d').getImageData(0, y, canvas.width, 1).data];
        """
        data = self.run(script, self.middle(row))
        return {tuple(data[at : at + 3]) for at in range(0, len(data), 4)}


def a_time(us: float) -> str:
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms"


def a_share(value: float) -> str:
    return f"{100 * value:.1f}%"


def a_ratio(value: float) -> str:
    return f"{value:.2f} x"


WRITTEN: dict[str, Callable[[Any], str]] = {
    "duration_us": a_time,
    "link_floor_us": a_time,
    "over_link_floor": a_ratio,
    "link_utilization": a_share,
    "bubbles_us": a_time,
    "bubble_fill": a_share,
    "draft_us": a_time,
    "hidden_draft_us": a_time,
    "exposed_draft_us": a_time,
    "streamed_bytes": format_size,
    "tokens_per_second": "{:.2f}".format,
    "median_round_us": a_time,
    "slowest_round_us": a_time,
    "mean_acceptance_length": "{:.2f}".format,
    "draft_acceptance_rate": a_share,
    "acceptance_per_position": lambda values: ", ".join(f"{value:.2f}" for value in values),
    "streamed_bytes_per_round": format_size,
    "link_bytes": format_size,
}


def written(figures: Any, field: str) -> str:
    """A figure as it should stand on the screen."""
    value = asdict(figures)[field]
    return "–" if value is None else WRITTEN.get(field, str)(value)  # noqa: RUF001
