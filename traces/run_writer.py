"""Writes a run while it runs, so that it can be read meanwhile, and also if the process dies.

What is on disk at any moment fits together: a round that `summary.jsonl` names is in a file of `rounds/`, and its plan
is in `plans.jsonl`. A process that is killed loses the rounds of a few seconds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from specstream.errors import InvalidOption
from specstream.traces.chrome import MOST_ROUNDS, write_trace
from specstream.traces.records import PlannedRound, RecordedRound, RoundSummary, RunInfo, to_json
from specstream.traces.run_folder import Lines, new_run_folder, replace_file, write_compressed

KEPT_ROUNDS = 2000
KEPT_TRACES = 2
"""Files for other tools, which read every one of them as a whole."""
SECONDS_BETWEEN_SAVES = 2.0
WORKER = "specstream"
"""Under which name other tools list the run."""


@dataclass(frozen=True)
class _Page:
    """A full file of rounds."""

    first: int
    count: int
    plans: frozenset[int]


class _Entry(NamedTuple):
    recorded: RecordedRound
    text: str
    """In JSON."""


class RunWriter:
    """Writes one run. A context manager; one thread at a time.

    Once there are more than `rounds` rounds the oldest file of them is deleted, with whatever only they needed. A plan
    that comes back after that gets a new id.
    """

    def __init__(self, logdir: str | Path, run_name: str, info: RunInfo, rounds: int = KEPT_ROUNDS) -> None:
        """Makes the run's folder, `path`; if there is one of that name, its name gets a number.

        Args:
            info: its name is replaced by that of the folder.
            rounds: how many are kept, at most.

        Raises:
            InvalidOption: rounds is no positive number, the name is none, or the folder cannot be written to.
        """
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise InvalidOption("rounds", rounds, "a positive number: how many rounds are kept")
        self.path = new_run_folder(logdir, run_name)
        self.info = replace(info, name=self.path.relative_to(Path(logdir).expanduser()).as_posix())
        self._rounds, self._page_size = rounds, min(MOST_ROUNDS, -(-rounds // 2))
        own = self.path / "specstream"
        (own / "rounds").mkdir()
        replace_file(own / "run.json", lambda file: file.write(to_json(self.info).encode()))
        self._plans, self._summary = Lines(own / "plans.jsonl"), Lines(own / "summary.jsonl")
        self._plan_ids: dict[Hashable, int] = {}
        self._next_plan = 0
        self._pages: dict[int, _Page] = {}
        """Full files of rounds, by the index of the first; an interrupted step may be done twice."""
        self._open: list[_Entry] = []
        """The rounds of the file that is not full yet."""
        self._saved_at = time.monotonic()
        self._traces: list[Path] = []

    def plan_id(self, key: Hashable, make: Callable[[int], PlannedRound]) -> int:
        """The id of a plan, which is made and written when its key is new."""
        if key not in self._plan_ids:
            number = self._next_plan
            self._next_plan += 1  # first: an interrupted write must not give its number to another plan
            self._plans.append([to_json(make(number))])
            self._plan_ids[key] = number
        return self._plan_ids[key]

    def add(self, recorded: RecordedRound) -> None:
        """Takes a round. Indices count from 0; a round that is there already is left out, so that a call that was
        interrupted can be made again.

        Raises:
            OSError: it could not be written.
        """
        if recorded.index >= self._next_index:
            self._open.append(_Entry(recorded, to_json(recorded)))
        while len(self._open) > self._page_size:
            self._turn_page()
        self._drop_oldest()
        if len(self._open) == self._page_size or time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES:
            self._save()

    def close(self) -> None:
        """Writes what is not written yet. Closing twice does nothing."""
        if self._open:
            self._turn_page()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _next_index(self) -> int:
        if self._open:
            return self._open[-1].recorded.index + 1
        return max((page.first + page.count for page in self._pages.values()), default=0)

    def _save(self) -> None:
        """Writes the rounds of the open file, then their lines of the summary."""
        entries = self._open[: self._page_size]
        first = entries[0].recorded.index
        if unsaved := entries[self._summary.appended - first :]:
            text = f"[{','.join(entry.text for entry in entries)}]"
            replace_file(self._file(first), lambda file: write_compressed(file, text))
            self._summary.append([to_json(RoundSummary.of(entry.recorded)) for entry in unsaved])
        self._saved_at = time.monotonic()

    def _turn_page(self) -> None:
        self._save()
        rounds = [entry.recorded for entry in self._open[: self._page_size]]
        self._write_trace(rounds)
        first = rounds[0].index
        self._pages[first] = _Page(first, len(rounds), frozenset(each.plan for each in rounds))
        del self._open[: len(rounds)]

    def _write_trace(self, rounds: list[RecordedRound]) -> None:
        """For other tools, the newest rounds again."""
        wanted = {each.plan for each in rounds}
        plans = {
            number: PlannedRound.from_json(json.loads(line))
            for line in self._plans.read()
            if (number := _number_of(line)) in wanted
        }
        path = self.path / f"{WORKER}.{rounds[0].index:08d}.pt.trace.json.gz"  # read in the order of their text
        replace_file(path, lambda file: write_trace(file, self.info, plans, rounds))
        self._traces = [*(each for each in self._traces if each != path), path]
        while len(self._traces) > KEPT_TRACES:
            self._traces[0].unlink(missing_ok=True)
            del self._traces[0]

    def _drop_oldest(self) -> None:
        while self._pages and sum(page.count for page in self._pages.values()) + len(self._open) > self._rounds:
            self._drop(next(iter(self._pages.values())))

    def _drop(self, page: _Page) -> None:
        """Deletes a file of rounds and whatever only they needed."""
        kept = (other.plans for first, other in self._pages.items() if first != page.first)
        used = frozenset[int]().union(*kept, {entry.recorded.plan for entry in self._open})
        self._summary.keep(lambda line: _number_of(line) >= page.first + page.count)
        self._file(page.first).unlink(missing_ok=True)
        if not page.plans <= used:
            self._plan_ids = {key: number for key, number in self._plan_ids.items() if number in used}
            self._plans.keep(lambda line: _number_of(line) in used)
        del self._pages[page.first]

    def _file(self, first: int) -> Path:
        """Of rounds, by the index of the first."""
        return self.path / "specstream" / "rounds" / f"{first:06d}.json.gz"


def _number_of(line: bytes) -> int:
    """The first field of a record: a plan's id, a round's index."""
    found = re.match(rb'\{"\w+":(\d+),', line)
    assert found is not None
    return int(found[1])
