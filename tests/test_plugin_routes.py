"""What TensorBoard's plugin for traced runs answers, asked through TensorBoard's own application."""

import json
import shutil
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client, TestResponse

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

from importlib.metadata import entry_points

from tensorboard.backend.application import TensorBoardWSGI
from tensorboard.plugins.base_plugin import TBContext

from specstream.traces.figures import measured_figures, measured_layers, planned_figures, planned_layers, run_figures
from specstream.traces.plugin import SpecStreamPlugin
from specstream.traces.records import RoundSummary, to_json
from tests.run_folders import planned_round, recorded_round, run_info, write_run

PLANS = [planned_round(0), planned_round(1, groups=6)]
ROUNDS = [recorded_round(PLANS[index % 2], index) for index in range(70)]
PREFIX = "/data/plugin/specstream"


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    write_run(tmp_path / "first", run_info("first"), PLANS, ROUNDS)
    write_run(tmp_path / "nested" / "second", run_info("second", kind="plan"), PLANS[:1], [])
    return tmp_path


def client(logdir: Path | None) -> Client:
    plugin = SpecStreamPlugin(TBContext(logdir=None if logdir is None else str(logdir)))
    return Client(TensorBoardWSGI([plugin]))


def asked(logdir: Path, route: str, **arguments: Any) -> Any:
    response = client(logdir).get(f"{PREFIX}/{route}", query_string=arguments)
    assert response.status_code == 200, response.text
    return response.json


def plain(record: Any) -> Any:
    """As it is in JSON."""
    return json.loads(to_json(record))


def test_tensorboard_finds_the_plugin() -> None:
    (found,) = entry_points(group="tensorboard_plugins", name="specstream")
    assert found.load() is SpecStreamPlugin


def test_runs_by_their_folders(logdir: Path) -> None:
    assert asked(logdir, "runs") == ["first", "nested/second"]


def test_a_run_with_its_figures_and_rounds(logdir: Path) -> None:
    answer = asked(logdir, "run", run="first")
    summaries = [RoundSummary.of(each) for each in ROUNDS]
    assert answer["info"] == plain(run_info("first"))
    assert answer["figures"] == plain(run_figures(run_info(), summaries))
    rows = [dict(zip(answer["rounds"]["columns"], row, strict=True)) for row in answer["rounds"]["rows"]]
    assert rows == [plain(each) for each in summaries]
    assert answer["link_floors_us"] == pytest.approx([PLANS[index % 2].link_floor_us for index in range(70)])


def test_a_plan(logdir: Path) -> None:
    answer = asked(logdir, "plan", run="first", plan=1)
    assert answer["text"] == PLANS[1].text
    assert answer["figures"] == plain(planned_figures(PLANS[1], run_info()))
    assert answer["layers"] == [plain(each) for each in planned_layers(PLANS[1])]
    tasks = [dict(zip(answer["tasks"]["columns"], row, strict=True)) for row in answer["tasks"]["rows"]]
    assert tasks == [asdict(task) for task in PLANS[1].tasks]
    assert len(answer["waits"]["rows"]) == len(PLANS[1].bubbles)


def test_a_round(logdir: Path) -> None:
    answer = asked(logdir, "round", run="first", round=33)
    assert (answer["index"], answer["plan"]) == (33, 1)
    assert answer["figures"] == plain(measured_figures(ROUNDS[33], PLANS[1], run_info()))
    assert answer["layers"] == [plain(each) for each in measured_layers(ROUNDS[33], PLANS[1])]
    assert answer["spans"] == [[s.task, s.start_us, s.stop_us, n] for n, s in enumerate(ROUNDS[33].spans)]
    exposed = sum(stop - start for start, stop in answer["exposed"])
    assert exposed == pytest.approx(answer["figures"]["exposed_draft_us"]) == pytest.approx(44)


def test_a_run_that_is_a_plan_has_no_rounds(logdir: Path) -> None:
    answer = asked(logdir, "run", run="nested/second")
    assert (answer["rounds"]["rows"], answer["figures"]["typical_round"]) == ([], None)
    assert asked(logdir, "plan", run="nested/second", plan=0)["id"] == 0


def test_a_run_that_grows_is_read_again(logdir: Path) -> None:
    page = client(logdir)
    assert len(page.get(f"{PREFIX}/run?run=first").json["rounds"]["rows"]) == 70  # type: ignore[index]
    with (logdir / "first" / "specstream" / "summary.jsonl").open("a") as file:
        file.write(to_json(RoundSummary.of(recorded_round(PLANS[0], 70))) + "\n")
    assert len(page.get(f"{PREFIX}/run?run=first").json["rounds"]["rows"]) == 71  # type: ignore[index]


def test_a_run_in_the_place_of_a_deleted_one_is_read_anew(logdir: Path) -> None:
    page = client(logdir)
    assert page.get(f"{PREFIX}/plan?run=first&plan=1").status_code == 200
    shutil.rmtree(logdir / "first")
    write_run(logdir / "first", run_info("first", draft=None), [planned_round(0, layers=1)], [])
    assert page.get(f"{PREFIX}/run?run=first").json["info"]["draft"] is None  # type: ignore[index]
    assert page.get(f"{PREFIX}/plan?run=first&plan=1").status_code == 404
    assert len(page.get(f"{PREFIX}/plan?run=first&plan=0").json["layers"]) == 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("route", "code", "message"),
    [
        ("run?run=third", 404, "there is no run 'third'"),
        ("run", 404, "there are: first, nested/second"),
        ("run?run=../first", 404, "there is no run '../first'"),
        ("plan?run=first&plan=2", 404, "has 2 plan(s), counted from 0, and so no 2"),
        ("plan?run=first", 400, "plan: got None; allowed: a whole number"),
        ("round?run=first&round=70", 404, "round 70 of"),
        ("round?run=first&round=last", 400, "round: got 'last'; allowed: a whole number"),
    ],
)
def test_what_cannot_be_answered_says_why(logdir: Path, route: str, code: int, message: str) -> None:
    response = client(logdir).get(f"{PREFIX}/{route}")
    assert response.status_code == code
    assert message in (response.json or {})["error"]


def test_damaged_files_are_said_to_be(logdir: Path) -> None:
    (logdir / "first" / "specstream" / "run.json").write_text("{")
    response = client(logdir).get(f"{PREFIX}/run?run=first")
    assert (response.status_code, "is not JSON" in response.text) == (400, True)


def test_it_is_active_where_there_is_a_run(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def active(folder: Path | None) -> bool:
        listing: Any = client(folder).get("/data/plugins_listing").json
        return bool(listing["specstream"]["enabled"])

    assert [active(logdir), active(tmp_path_factory.mktemp("empty")), active(None)] == [True, False, False]


def static(logdir: Path, name: str) -> TestResponse:
    return client(logdir).get(f"{PREFIX}/static/{name}")


def test_the_pages_files(logdir: Path, root: Path) -> None:
    folder = root / "traces" / "plugin" / "static"
    files = [path for path in folder.rglob("*") if path.suffix in {".js", ".css"}]
    assert folder / "index.js" in files
    for path in files:
        response = static(logdir, path.relative_to(folder).as_posix())
        assert response.data == path.read_bytes()
        assert response.mimetype in {"text/javascript", "text/css"}
    entry = client(logdir).get("/data/plugin_entry.html?name=specstream").text
    assert 'import("./static/index.js")' in entry


@pytest.mark.parametrize("name", ["", "../routes.py", "%2e%2e/routes.py", "uplot/LICENSE", "nothing.js"])
def test_no_other_file_is_served(logdir: Path, name: str) -> None:
    assert static(logdir, name).status_code == 404


UPLOT = {  # of the package uplot 1.6.32 in npm's registry
    "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_the_charting_library_is_as_its_authors_made_it(root: Path) -> None:
    folder = root / "traces" / "plugin" / "static" / "uplot"
    assert {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == UPLOT
