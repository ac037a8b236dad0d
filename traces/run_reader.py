"""Reads a run's folder, also while it is being written."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, TypeVar

from specstream.traces.records import FORMAT, PlannedRound, RecordedRound, RoundSummary, RunInfo, of

FOLDER = "specstream"
"""In the run's folder: what is ours."""
KEPT_PLANS, KEPT_FILES = 8, 2
"""How many the reader keeps in memory. A file has up to 64 rounds."""


def find_runs(logdir: str | Path) -> dict[str, Path]:
    """The runs in a folder and in those below it: by name, the path from `logdir`, in order; "." is `logdir` itself."""
    found = {}
    for folder, inner, _ in os.walk(logdir):
        path = Path(folder)
        if (path / FOLDER / "run.json").is_file():
            found[path.relative_to(logdir).as_posix()] = path
        inner[:] = [name for name in inner if name != FOLDER]
    return dict(sorted(found.items()))


class RunReader:
    """One run.

    What is asked for is read then: of plans and rounds the latest few stay in memory. The last line of a file that is
    being written may be cut: it is left out.

    Args:
        path: the run's folder.

    Raises:
        FileNotFoundError: no run was written there.
        ValueError: a file is not what this version writes; also raised by the methods.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = self.path / FOLDER
        self._plan_starts = [0]
        self._plans: _Latest[PlannedRound] = _Latest(KEPT_PLANS)
        self._files: _Latest[list[dict[str, Any]]] = _Latest(KEPT_FILES)
        self._summaries: _Latest[list[RoundSummary]] = _Latest(1)
        self.info = self._read_info()
        self._opened = _version(self._folder / "run.json")

    def is_current(self) -> bool:
        """Whether the folder still holds the run that was opened: it may have been deleted, and another written."""
        path = self._folder / "run.json"
        return path.is_file() and _version(path) == self._opened

    def _read_info(self) -> RunInfo:
        path = self._folder / "run.json"
        if not path.is_file():
            raise FileNotFoundError(f"{self.path} is not the folder of a run: there is no {FOLDER}/run.json in it")
        data = _parsed(path.read_bytes(), str(path))
        if data.get("format", FORMAT) > FORMAT:
            raise ValueError(
                f"{path} has format {data['format']}; this version of specstream reads {FORMAT} at most: update it"
            )
        return of(RunInfo, data)

    @property
    def num_plans(self) -> int:
        """How many there are so far; their ids count from 0."""
        self._find_plans()
        return len(self._plan_starts) - 1

    def plans(self) -> list[PlannedRound]:
        """All plans, in the order of their ids."""
        return [self.plan(number) for number in range(self.num_plans)]

    def plan(self, number: int) -> PlannedRound:
        """The plan of that id. Raises KeyError if there is none."""
        return self._plans.get(number, lambda: self._read_plan(number))

    def _read_plan(self, number: int) -> PlannedRound:
        if not 0 <= number < self.num_plans:
            raise KeyError(f"{self.path} has {self.num_plans} plan(s), counted from 0, and so no {number}")
        path = self._folder / "plans.jsonl"
        start, stop = self._plan_starts[number : number + 2]
        with path.open("rb") as file:
            file.seek(start)
            return PlannedRound.from_json(_parsed(file.read(stop - start), f"{path}, line {number + 1}"))

    def _find_plans(self) -> None:
        """Looks where lines begin that were written since it last did."""
        path = self._folder / "plans.jsonl"
        if path.is_file():
            with path.open("rb") as file:
                file.seek(self._plan_starts[-1])
                for line in file:
                    if line.endswith(b"\n"):
                        self._plan_starts.append(self._plan_starts[-1] + len(line))

    def summaries(self) -> list[RoundSummary]:
        """The rounds that are kept, in order."""
        path = self._folder / "summary.jsonl"
        return self._summaries.get(_version(path), lambda: _read_summaries(path)) if path.is_file() else []

    def round(self, index: int) -> RecordedRound:
        """One round with its spans.

        Raises:
            KeyError: it was not written, not yet, or is not kept any more.
        """
        numbered = {int(path.name.split(".")[0]): path for path in (self._folder / "rounds").glob("[0-9]*.json.gz")}
        paths = [numbered[number] for number in sorted(numbered)]
        first, last = 0, len(paths) - 1
        # Names of files are numbers that grow with the rounds. The first guess is that they are those of first rounds.
        at = max(0, sum(number <= index for number in numbered) - 1)
        while first <= last:
            rounds = self._read_rounds(paths[at])
            if not rounds or rounds[-1]["index"] < index:
                first = at + 1
            elif rounds[0]["index"] > index:
                last = at - 1
            else:
                found = next((each for each in rounds if each["index"] == index), None)
                if found is not None:
                    return RecordedRound.from_json(found)
                break
            at = (first + last) // 2
        raise KeyError(f"round {index} of {self.path} is not in its files: not written yet, or not kept any more")

    def _read_rounds(self, path: Path) -> list[dict[str, Any]]:
        try:
            return self._files.get(_version(path), lambda: _unpacked(path))
        except FileNotFoundError:  # deleted meanwhile, as the oldest
            return []


Item = TypeVar("Item")


class _Latest(Generic[Item]):
    """Keeps what was read last."""

    def __init__(self, kept: int) -> None:
        self._kept, self._items = kept, dict[Hashable, Item]()

    def get(self, key: Hashable, make: Callable[[], Item]) -> Item:
        item = self._items.pop(key) if key in self._items else make()
        self._items[key] = item
        while len(self._items) > self._kept:
            del self._items[next(iter(self._items))]
        return item


def _version(path: Path) -> Hashable:
    status = path.stat()
    return path, status.st_ino, status.st_mtime_ns, status.st_size


def _read_summaries(path: Path) -> list[RoundSummary]:
    lines = path.read_bytes().split(b"\n")
    return [
        of(RoundSummary, _parsed(line, f"{path}, line {number}")) for number, line in enumerate(lines[:-1], 1) if line
    ]


def _unpacked(path: Path) -> list[dict[str, Any]]:
    try:
        rounds = json.loads(gzip.decompress(path.read_bytes()))
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} holds no rounds: {error}") from error
    if not isinstance(rounds, list) or not all(isinstance(each, dict) and "index" in each for each in rounds):
        raise ValueError(f"{path} holds no rounds: a list of them is expected")
    return rounds


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{place} is no record: a JSON object is expected, not {type(data).__name__}")
    return data
