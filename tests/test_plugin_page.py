"""The plugin's page in TensorBoard, opened in headless Chromium, which reaches nothing but this machine."""

import gzip
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
pytest.importorskip("selenium", reason="selenium, which drives the browser, is not installed")

from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from specstream.options import format_size
from specstream.traces.figures import measured_figures, planned_figures, run_figures
from specstream.traces.records import PlannedRound, RoundSummary, to_json
from tests.plugin_page import Page, a_time, written
from tests.run_folders import planned_round, recorded_round, run_info, write_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs the programs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)

INFO = run_info("first")
PLAN = planned_round(layers=4, groups=6, draft_us=40.0)
ROUNDS = [recorded_round(PLAN, index, 1.05 + 0.01 * (index * 7 % 10)) for index in range(100)]
OTHER_INFO = run_info("second", memory={"weights": 1 << 30})
OTHER_PLAN = planned_round(layers=4, groups=3, draft_us=30.0)
OTHER_ROUNDS = [recorded_round(OTHER_PLAN, index, 1.2) for index in range(20)]
LONG_ROUNDS, LONG_LAYERS, LONG_GROUPS = 2000, 36, 16
TYPICAL = run_figures(INFO, [RoundSummary.of(each) for each in ROUNDS]).typical_round or 0


def write_long_run(folder: Path) -> None:
    """2,000 rounds whose spans are the same: their text is made once."""
    plan = planned_round(layers=LONG_LAYERS, groups=LONG_GROUPS)
    rounds = [recorded_round(plan, index, 1.1, spans=False) for index in range(LONG_ROUNDS)]
    spans = ",".join(to_json(span) for span in recorded_round(plan, 0, 1.1).spans)
    write_run(folder, run_info("long"), [plan], rounds)
    for first in range(0, LONG_ROUNDS, 64):
        texts = (to_json(each).replace('"spans":[]', f'"spans":[{spans}]') for each in rounds[first : first + 64])
        path = folder / "specstream" / "rounds" / f"{first:06}.json.gz"
        path.write_bytes(gzip.compress(f"[{','.join(texts)}]".encode(), compresslevel=1))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a TensorBoard answers that shows a few runs."""
    logdir = tmp_path_factory.mktemp("runs")
    write_run(logdir / "first", INFO, [PLAN], ROUNDS)
    write_run(logdir / "second", OTHER_INFO, [OTHER_PLAN], OTHER_ROUNDS)
    write_run(logdir / "planned", run_info("planned", kind="plan"), [PLAN], [])
    write_run(logdir / "new", run_info("new"), [], [])
    write_long_run(logdir / "long")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", "--load_fast", "false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=logdir) as server:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if " at http://" in line:
                break
        else:
            pytest.fail(f"TensorBoard did not start:\n{''.join(said)}")
        yield line.split(" at ")[1].split()[0]
        server.terminate()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",  # needed by root, in containers
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1400,1600",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=Service(str(DRIVER)))
    yield browser
    browser.quit()


@pytest.fixture
def page(chromium: Chrome, address: str) -> Iterator[Page]:
    """The page, freshly loaded, at the first run; afterwards there is no error in the console."""
    chromium.get("about:blank")
    chromium.get(f"{address}#specstream")
    WebDriverWait(chromium, 20).until(lambda browser: browser.find_elements(By.TAG_NAME, "iframe"))
    chromium.switch_to.frame(chromium.find_element(By.TAG_NAME, "iframe"))
    page = Page(chromium)
    page.until(lambda: chromium.find_elements(By.ID, "plan") and page.text("plan"))
    page.until(lambda: page.text("status") == "")
    yield page
    errors = [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
    assert errors == []


def test_the_lanes_are_shown_planned_above_measured(page: Page) -> None:
    lanes = [f"{lane} {kind}" for lane in INFO.lanes for kind in ("planned", "measured")]
    assert page.text("labels").splitlines() == lanes
    assert [page.middle(lane) for lane in lanes] == sorted(page.middle(lane) for lane in lanes)
    assert page.round() == TYPICAL
    # Each lane has its colour; the store does nothing.
    seen = {lane: page.colors(f"{lane} measured") for lane in INFO.lanes}
    assert (230, 159, 0) in seen["link"]
    assert (0, 114, 178) in seen["target"]
    assert (213, 94, 0) in seen["draft"], "exposed"
    assert not {(230, 159, 0), (0, 114, 178), (213, 94, 0)} & seen["store"]


def test_zooming_and_moving(page: Page) -> None:
    whole = page.view()
    assert whole[1] >= ROUNDS[TYPICAL].duration_us
    page.press("w")
    start, stop = page.view()
    assert stop - start == pytest.approx((whole[1] - whole[0]) / 1.5, rel=0.01)
    page.press("d")
    assert page.view()[0] > start
    page.press("a", "s")
    assert page.view() == pytest.approx(whole, abs=0.2)
    page.element("zoomIn").click()
    page.element("fit").click()
    assert page.view() == whole
    wheel = """
        const canvas = document.getElementById('canvas');
        canvas.focus();
        canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: -600, clientX: canvas.getBoundingClientRect().left}));
    """
    page.run(wheel)
    start, stop = page.view()
    assert start == whole[0], "it zooms in on where the pointer is"
    assert stop - start < (whole[1] - whole[0]) / 5
    drag = ActionChains(page.browser, duration=0).click_and_hold(page.element("canvas")).move_by_offset(-100, 0)
    drag.release().perform()
    assert page.view()[0] > start
    ActionChains(page.browser, duration=0).double_click(page.element("canvas")).perform()
    assert page.view() == whole


def test_pointing_at_a_task_tells_what_it_is(page: Page) -> None:
    recorded = ROUNDS[TYPICAL]
    span = next(each for each in recorded.spans if each.task == "fetch/2/3")
    page.point_at("link measured", (span.start_us + span.stop_us) / 2)
    tip = page.text("tip")
    rate = 500_000 / (span.stop_us - span.start_us) / 1e3
    for part in ("fetch/2/3 (fetch), measured", "layer 2, group 3, slot 1", "488.28 KiB", f"{rate:.1f} GB/s"):
        assert part in tip
    page.point_at("target planned", next(t.start_us for t in PLAN.tasks if t.name == "attend/2/3") + 1)
    assert "planned to start right after fetch/2/3 (waits for), after 5.0 us of standing still" in page.text("tip")
    page.point_at("draft planned", PLAN.period_us - 60)
    assert "draft step 0" in page.text("tip")
    assert "exposed: the target waits for it" in page.text("tip")
    page.point_at("target measured", recorded.duration_us - 20)
    assert "bubble, measured: the target waits for the draft" in page.text("tip")
    page.point_at("store measured", 10)
    assert not page.element("tip").is_displayed()


def test_keys_go_from_task_to_task(page: Page) -> None:
    page.press("n")
    assert page.text("details").startswith("piece/0 (piece), planned")
    page.press("n", "n")
    assert page.text("details").startswith("attend/0/1 (attend), planned")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert "(fetch), planned" in page.text("details")
    page.press("p", Keys.ESCAPE)
    assert page.text("details") == ""


def expect_figures(page: Page, plan: PlannedRound, index: int) -> None:
    planned, measured = planned_figures(plan, INFO), measured_figures(ROUNDS[index], plan, INFO)
    heads, rows = page.table("roundFigures")
    assert heads == ["planned", f"round {index}"]
    assert len(rows) == 10
    for field, cells in rows.items():
        assert cells == [written(planned, field), written(measured, field)], field


def test_numbers_are_those_of_the_figures(page: Page) -> None:
    expect_figures(page, PLAN, TYPICAL)
    figures = run_figures(INFO, [RoundSummary.of(each) for each in ROUNDS])
    _, rows = page.table("runFigures")
    assert len(rows) == 15
    assert rows == {field: [written(figures, field)] for field in rows}
    _, memory = page.table("memory")
    assert memory == {name: [format_size(size)] for name, size in INFO.memory.items()}
    _, layers = page.table("layers")
    assert list(layers) == ["none", "0", "1", "2", "3"]
    assert layers["1"][:2] == [format_size(6 * 500_000), "30.0 us"]
    _, requests = page.table("requests")
    assert [requests[str(each.request_id)][1] for each in ROUNDS[TYPICAL].requests] == ["4", "0"]


def test_arrows_step_through_rounds(page: Page) -> None:
    page.press("w", Keys.ARROW_RIGHT)
    page.until(lambda: page.table("roundFigures")[0][1] == f"round {TYPICAL + 1}")
    expect_figures(page, PLAN, TYPICAL + 1)
    view = page.view()
    page.browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ARROW_LEFT + Keys.ARROW_LEFT + Keys.ARROW_LEFT)
    page.until(lambda: page.table("roundFigures")[0][1] == f"round {TYPICAL - 2}")
    assert page.round() == TYPICAL - 2
    assert page.view() == view, "the same part of each round"


def test_a_click_on_the_overview_opens_a_round(page: Page) -> None:
    over = page.browser.find_element(By.CSS_SELECTOR, "#overview .u-over")
    ActionChains(page.browser, duration=0).move_to_element_with_offset(
        over, over.size["width"] // 4, 0
    ).click().perform()
    page.until(lambda: page.round() in range(72, 78))
    page.until(lambda: page.table("roundFigures")[0][1] == f"round {page.round()}")
    expect_figures(page, PLAN, page.round())


def test_two_runs_side_by_side(page: Page) -> None:
    Select(page.element("compare")).select_by_value("second")
    page.until(lambda: page.table("runFigures")[0] == ["first", "second", "difference"])
    first, second = (
        run_figures(info, [RoundSummary.of(each) for each in rounds])
        for info, rounds in ((INFO, ROUNDS), (OTHER_INFO, OTHER_ROUNDS))
    )
    _, rows = page.table("runFigures")
    assert {field: cells[:2] for field, cells in rows.items()} == {
        field: [written(first, field), written(second, field)] for field in rows
    }
    change = 100 * (second.tokens_per_second / first.tokens_per_second - 1)
    assert rows["tokens_per_second"][2] == f"{'+' if change > 0 else '−'}{abs(change):.1f}%"  # noqa: RUF001
    heads, rows = page.table("roundFigures")
    measured = measured_figures(OTHER_ROUNDS[second.typical_round or 0], OTHER_PLAN, OTHER_INFO)
    assert heads[3] == f"second: round {second.typical_round}"
    assert {field: cells[3] for field, cells in rows.items()} == {field: written(measured, field) for field in rows}


def test_a_run_that_is_only_planned(page: Page) -> None:
    page.open_run("planned")
    assert page.text("labels").splitlines() == [f"{lane} planned" for lane in INFO.lanes]
    heads, rows = page.table("roundFigures")
    assert heads == ["planned", "not measured"]
    assert rows["duration_us"] == [a_time(PLAN.period_us), "–"]  # noqa: RUF001
    assert page.text("of") == "only planned"


def test_a_run_of_which_nothing_is_recorded_yet(page: Page) -> None:
    Select(page.element("run")).select_by_value("new")
    page.until(lambda: page.text("status") == "nothing of new is recorded yet")


def test_it_follows_tensorboards_dark_mode(page: Page) -> None:
    def ground() -> str:
        return str(page.run("return getComputedStyle(document.body).backgroundColor"))

    outer = "window.parent.document.body.classList.toggle('dark-mode', arguments[0])"
    page.run(outer, True)
    page.until(lambda: ground() == "rgb(48, 48, 48)")
    assert (56, 56, 56) in page.colors("store measured")
    page.run(outer, False)
    page.until(lambda: ground() == "rgb(255, 255, 255)")
    assert (244, 244, 244) in page.colors("store measured")


def test_a_round_that_is_not_kept_is_said_to_be_missing(page: Page) -> None:
    page.run(
        "const round = document.getElementById('round'); round.value = 4711;round.dispatchEvent(new Event('change'))"
    )
    page.until(lambda: "round 4711 of" in page.text("status"))
    assert page.round() == TYPICAL, "the one that is still shown"
    page.browser.get_log("browser")  # type: ignore[no-untyped-call]  # where the browser notes the answer, 404


def test_nothing_is_fetched_from_elsewhere(page: Page, address: str) -> None:
    script = "return performance.getEntriesByType('resource').map((each) => each.name)"
    names = page.run(script)
    assert len(names) > 10
    assert [name for name in names if not name.startswith(address)] == []


def test_long_runs_open_fast(page: Page) -> None:
    start = time.perf_counter()
    page.open_run("long")
    seconds = time.perf_counter() - start
    assert page.text("of") == f"of 0 to {LONG_ROUNDS - 1}"
    assert len(page.table("layers")[1]) == LONG_LAYERS + 1
    assert seconds < 3
