"""Runs on disk: bounded, whole at every moment, and never over another run."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.errors import InvalidOption
from specstream.traces import run_folder, run_writer
from specstream.traces.chrome import MOST_ROUNDS, Trace
from specstream.traces.records import PlannedRound, RecordedRound, RoundSummary, to_json
from specstream.traces.run_writer import RunWriter
from specstream.traces.validate import validate
from tests.trace_cases import INFO, json_lines, on_disk, toy_plan, toy_round

PLAN, OTHER = toy_plan(), toy_plan(streamed=4)


def write(writer: RunWriter, index: int, key: str = "a") -> None:
    number = writer.plan_id(key, lambda number: toy_plan(number))
    writer.add(toy_round(index, toy_plan(number), measured=index % 2 == 0))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    plans = {"a": PLAN, "b": toy_plan(1, streamed=4)}
    with RunWriter(tmp_path, "run", INFO) as writer:
        for index in range(150):
            key = "ab"[index % 2]
            assert writer.plan_id(key, lambda number, key=key: plans[key]) == plans[key].id  # type: ignore[misc]
            writer.add(toy_round(index, plans[key]))
    found = on_disk(tmp_path / "run")
    assert found.info.name == "run"
    assert found.plans == {0: PLAN, 1: plans["b"]}
    assert found.rounds == {index: toy_round(index, plans["ab"[index % 2]]) for index in range(150)}
    assert found.summaries == [RoundSummary.of(each) for each in found.rounds.values()]
    assert found.rounds_of_files == [64, 64, 22]
    assert [trace.name for trace in found.traces] == [f"specstream.{n:08d}.pt.trace.json.gz" for n in (64, 128)]
    assert [validate(trace) for trace in found.traces] == [[], []]
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("name", ["run", "nested/run"])
def test_a_name_that_is_taken_gets_a_number(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "mine").write_text("kept")
    paths = [RunWriter(tmp_path, name, INFO).path for _ in range(2)]
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [f"{name}-2", f"{name}-3"]
    assert [on_disk(path).info.name for path in paths] == [f"{name}-2", f"{name}-3"]
    assert [file.name for file in (tmp_path / name).iterdir()] == ["mine"]


NO_NAMES = ["", "..", "a/specstream", "a/../../b", "/absolute", "a\0b", "x" * 300, "\u00e9" * 130, "a/" + "x" * 241]


@pytest.mark.parametrize("name", [*NO_NAMES, 5, None, Path("a"), b"a"])
def test_names_that_are_none(tmp_path: Path, name: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^run: got .* allowed: .* Leave it out, and it is the time"):
        RunWriter(tmp_path / "logs", name, INFO)
    assert not list(tmp_path.iterdir())


def test_the_longest_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    paths = [RunWriter(tmp_path, "x" * 240, INFO).path for _ in range(2)]
    assert [len(path.name) for path in paths] == [240, 242]


@pytest.mark.parametrize("logdir", ["", None, 5, b"logs", "~nobody-of-this-name"])
def test_logdirs_that_are_none(logdir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=r"^logdir: got .* allowed: a folder"):
        RunWriter(logdir, "run", INFO)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rounds", [0, -1, True, 2.5, None])
def test_numbers_of_rounds_that_are_none(tmp_path: Path, rounds: Any) -> None:
    with pytest.raises(InvalidOption, match="rounds: got"):
        RunWriter(tmp_path, "run", INFO, rounds)
    assert not list(tmp_path.iterdir())


def test_a_logdir_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match=r"^logdir: got .*file.* allowed: a folder that can be written to"):
        RunWriter(tmp_path / "file", "run", INFO)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
def test_the_ring_holds_the_latest_rounds_and_their_plans(
    tmp_path_factory: pytest.TempPathFactory, rounds: int, keys: list[str]
) -> None:
    writer = RunWriter(tmp_path_factory.mktemp("logs"), "run", INFO, rounds)
    for index, key in enumerate(keys):
        write(writer, index, key)
    writer.close()
    found = on_disk(writer.path)
    kept = list(found.rounds)
    assert len(kept) <= rounds
    assert len(kept) >= min(len(keys), (rounds + 1) // 2)
    assert kept == list(range(len(keys) - len(kept), len(keys)))
    assert [each.index for each in found.summaries] == kept
    assert {each.plan for each in found.rounds.values()} <= found.plans.keys()
    assert list(found.plans) == list(range(len(set(keys))))  # all of them: a plan's id is the number of its line
    assert len(found.traces) <= 2


def test_what_is_on_disk_fits_together_after_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN_SAVES", -1.0)  # at once
    writer = RunWriter(tmp_path, "run", INFO, 10)
    for index in range(25):
        write(writer, index, f"plan {index // 4}")
        found = on_disk(writer.path)  # as after a crash: nothing was closed
        assert [each.index for each in found.summaries] == list(found.rounds)
        assert max(found.rounds) == index
        assert {each.plan for each in found.rounds.values()} <= found.plans.keys()


def test_a_page_that_is_full_takes_no_longer_than_another_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round is put into its files when it is added. With one plan in memory others are read again."""
    monkeypatch.setattr(run_writer, "KNOWN_PLANS", 1)
    add_round, counts = Trace.add_round, list[int]()

    def counted(self: Trace, recorded: RecordedRound, plan: PlannedRound) -> None:
        assert plan.id == recorded.plan
        counts[-1] += 1
        add_round(self, recorded, plan)

    monkeypatch.setattr(Trace, "add_round", counted)
    with RunWriter(tmp_path, "run", INFO) as writer:
        for index in range(MOST_ROUNDS + 3):
            counts.append(0)
            write(writer, index, "ab"[index % 2])
        counts.append(0)
    assert counts == [1] * (MOST_ROUNDS + 3) + [0]


def test_rounds_wait_a_little_to_be_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    writer = RunWriter(tmp_path, "run", INFO)
    seen = []
    for index in range(5):
        write(writer, index)
        seen.append(len(on_disk(writer.path).summaries))
        clock[0] += 1.0
    assert seen == [0, 0, 0, 4, 4]


def interrupted_at(count: int, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """The function, which Ctrl-C strikes before or after its `count`-th call."""
    calls = 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            raise KeyboardInterrupt
        result = function(*arguments)
        if calls == count:
            raise KeyboardInterrupt
        return result

    return called


def twice(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function again if it was interrupted."""
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        return function(*arguments)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", [(os, "replace"), (run_folder.Lines, "append"), (run_folder.Lines, "keep")])
def test_an_interrupted_write_is_made_good(
    where: tuple[Any, str], after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = where
    monkeypatch.setattr(run_writer, "SECONDS_BETWEEN_SAVES", -1.0)
    for count in range(1, 30):
        writer = RunWriter(tmp_path, "run", INFO, 8)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted_at(count, getattr(module, name), after=after))
            for index in range(12):
                number = twice(writer.plan_id, index // 3, lambda number: toy_plan(number))
                with suppress(KeyboardInterrupt):
                    writer.add(toy_round(index, toy_plan(number)))
            twice(writer.close)
        found = on_disk(writer.path)
        kept = list(found.rounds)
        assert kept == list(range(kept[0], 12))
        assert 4 <= len(kept) <= 8
        assert [each.index for each in found.summaries] == kept
        assert {each.plan for each in found.rounds.values()} <= found.plans.keys()


def test_a_round_that_is_there_already_is_left_out(tmp_path: Path) -> None:
    """So that a call that was interrupted can be made again; in the open file, and in one that is full."""
    with RunWriter(tmp_path, "run", INFO, 8) as writer:
        for index in range(7):
            write(writer, index)
            write(writer, index)
        assert [each.index for each in writer._open] == [4, 5, 6]
    found = on_disk(writer.path)
    assert (list(found.rounds), found.rounds_of_files) == (list(range(7)), [4, 3])
    assert [each.index for each in found.summaries] == list(range(7))


def test_a_torn_line_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run_folder.Lines(tmp_path / "lines")
    lines.append(["1", "2"])
    opened = Path.open

    def torn(self: Path, mode: str) -> Any:
        file = opened(self, mode)

        class Torn(io.BytesIO):
            def write(self, data: Any) -> int:
                file.write(data[:1])
                file.close()
                raise KeyboardInterrupt

            def seek(self, *place: int) -> int:
                return file.seek(*place)

        return Torn()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", torn)
        with pytest.raises(KeyboardInterrupt):
            lines.append(["345"])
    assert (tmp_path / "lines").read_text() == "1\n2\n3"
    lines.append(["6"])
    lines.keep(lambda line: line != b"1\n")
    lines.append(["7"])
    assert (tmp_path / "lines").read_text() == "2\n6\n7\n"
    assert json_lines(tmp_path / "lines") == [2, 6, 7]


def test_closing_twice_writes_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, "run", INFO)
    write(writer, 0)
    writer.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    writer.close()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert json.loads(to_json(OTHER))["streamed_bytes"] > PLAN.streamed_bytes
