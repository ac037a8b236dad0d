"""Runs as they are read back: whole, while they are written, and what is said of those that cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specstream.traces.records import RecordedRound, RequestRound, RoundSummary, to_json
from specstream.traces.run_reader import RunReader, find_runs
from tests.run_folders import planned_round, recorded_round, run_info, write_run

PLANS = [planned_round(0), planned_round(1, groups=6)]
ROUNDS = [recorded_round(PLANS[index % 2], index) for index in range(200)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", run_info(), PLANS, ROUNDS)


def test_what_was_written_is_read_back(run: Path) -> None:
    reader = RunReader(run)
    assert reader.info == run_info()
    assert reader.plans() == PLANS
    assert reader.plan(1) == PLANS[1]
    assert reader.summaries() == [RoundSummary.of(each) for each in ROUNDS]
    assert [reader.round(index) for index in (0, 199, 63, 64, 130)] == [ROUNDS[i] for i in (0, 199, 63, 64, 130)]


@pytest.mark.parametrize("step", [1, 64], ids=["numbers of files", "numbers of rounds"])
def test_rounds_are_found_whatever_the_files_count(tmp_path: Path, step: int) -> None:
    run = write_run(tmp_path / "run", run_info(), PLANS, ROUNDS)
    for number, path in enumerate(sorted((run / "specstream" / "rounds").iterdir())):
        path.rename(path.with_name(f"{number * step:06}.json.gz"))
    reader = RunReader(run)
    assert [reader.round(index).index for index in range(0, 200, 7)] == list(range(0, 200, 7))


def test_a_round_is_read_from_one_file(run: Path) -> None:
    for path in (run / "specstream" / "rounds").iterdir():
        if path.name != "000128.json.gz":
            path.write_bytes(b"not to be read")
    assert RunReader(run).round(150) == ROUNDS[150]


def test_a_line_that_is_cut_is_left_out_until_it_is_whole(run: Path) -> None:
    summary, plans = run / "specstream" / "summary.jsonl", run / "specstream" / "plans.jsonl"
    line, plan = to_json(replace(RoundSummary.of(ROUNDS[-1]), index=200)), to_json(replace(PLANS[0], id=2))
    reader = RunReader(run)
    for path, text in ((summary, line), (plans, plan)):
        with path.open("a") as file:
            file.write(text[:40])
    assert len(reader.summaries()) == 200
    assert len(reader.plans()) == 2
    for path, text in ((summary, line), (plans, plan)):
        with path.open("a") as file:
            file.write(text[40:] + "\n")
    assert reader.summaries()[-1].index == 200
    assert reader.plan(2).tasks == PLANS[0].tasks


def test_rounds_that_are_not_kept_any_more_are_missing(run: Path) -> None:
    reader = RunReader(run)
    (run / "specstream" / "rounds" / "000000.json.gz").unlink()
    assert reader.round(64) == ROUNDS[64]
    for index in (-1, 3, 200):
        with pytest.raises(KeyError, match=f"round {index} of .* not written yet, or not kept any more"):
            reader.round(index)


def test_a_plan_that_is_missing(run: Path) -> None:
    with pytest.raises(KeyError, match=r"has 2 plan.* no 2"):
        RunReader(run).plan(2)


def test_a_run_before_its_first_round(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path / "run", run_info(kind="plan"), [], []))
    assert (reader.plans(), reader.summaries()) == ([], [])
    with pytest.raises(KeyError):
        reader.round(0)


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not the folder of a run: there is no specstream/run\.json"):
        RunReader(tmp_path / "empty")
    path = run / "specstream" / "run.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"format": 2}))
    with pytest.raises(ValueError, match="format 2; this version of specstream reads 1 at most"):
        RunReader(run)
    del data["target"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"not a RunInfo.*target"):
        RunReader(run)
    path.write_text("[]")
    with pytest.raises(ValueError, match="a JSON object is expected, not list"):
        RunReader(run)


def test_damaged_files_are_named(run: Path) -> None:
    reader = RunReader(run)
    path = run / "specstream" / "rounds" / "000064.json.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"000064\.json\.gz holds no rounds"):
        reader.round(70)
    summary = run / "specstream" / "summary.jsonl"
    summary.write_text("{}}\n" + summary.read_text())
    with pytest.raises(ValueError, match=r"summary\.jsonl, line 1 is not JSON"):
        reader.summaries()


def test_runs_are_found_in_nested_folders(tmp_path: Path) -> None:
    for name in ("b", "a/deep/one"):
        write_run(tmp_path / name, run_info(), [], [])
    (tmp_path / "other").mkdir()
    assert find_runs(tmp_path) == {"a/deep/one": tmp_path / "a/deep/one", "b": tmp_path / "b"}
    assert find_runs(tmp_path / "b") == {".": tmp_path / "b"}
    assert find_runs(tmp_path / "nowhere") == {}


def test_a_summary_counts_verifications_as_the_engine_does() -> None:
    requests = (RequestRound(0, 0, 4, 2, 3), RequestRound(1, 0, 0, 0, 1), RequestRound(2, 64, 0, 0, 1))
    summary = RoundSummary.of(RecordedRound(0, 0.0, 1.0, 0, 0, 0, requests))
    assert (summary.verifications, summary.most_candidates, summary.accepted_of) == (2, 4, (2,))
    assert (summary.prompt_tokens, summary.candidates, summary.accepted, summary.produced) == (64, 4, 2, 5)
