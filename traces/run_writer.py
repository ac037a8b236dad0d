"""Writes a run while it runs, so that it can be read meanwhile, and also if the process dies.

What is on disk at any moment fits together: a round that `summary.jsonl` names is in a file of `rounds/`, and its plan
is in `plans.jsonl`. A process that is killed loses the rounds of a few seconds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specstream.errors import InvalidOption
from specstream.round_plan import Plan
from specstream.traces.chrome import MOST_ROUNDS, write_trace
from specstream.traces.records import PlannedRound, RecordedRound, RoundSummary, RunInfo, to_json
from specstream.traces.run_folder import OWN, Lines, new_run_folder, replace_file, write_compressed

if TYPE_CHECKING:
    from specstream.traces.events import EventFile

KEPT_ROUNDS = 2000
KEPT_TRACES = 2
"""Files for other tools, which read every one of them as a whole."""
SECONDS_BETWEEN_SAVES = 2.0
WORKER = "specstream"
"""Under which name other tools list the run."""


class _Entry(NamedTuple):
    recorded: RecordedRound
    text: str
    """In JSON."""


class RunWriter:
    """Writes one run. A context manager; one thread at a time.

    Once there are more than `rounds` rounds the oldest file of them is deleted, and their lines of the summary. Plans
    are all kept: a line's number is the plan's id. With TensorBoard installed there is a file for its own dashboards
    too.
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
        own = self.path / OWN
        (own / "rounds").mkdir()
        replace_file(own / "run.json", lambda file: file.write(to_json(self.info).encode()))
        self._plans, self._summary = Lines(own / "plans.jsonl"), Lines(own / "summary.jsonl")
        self._plan_ids: dict[Hashable, int] = {}
        self._pages: dict[int, int] = {}
        """Full files of rounds: how many there are in each, by the index of the first."""
        self._open: list[_Entry] = []
        """The rounds of the file that is not full yet."""
        self._saved_at = time.monotonic()
        self._traces: list[Path] = []
        self._read_plans: dict[int, PlannedRound] = {}
        """Those that were wanted last."""
        self._events = _event_file(self.path, self.info, rounds)

    def plan_id(self, key: Hashable, make: Callable[[int], PlannedRound]) -> int:
        """The id of a plan, which is made and written when its key is new."""
        if key not in self._plan_ids:
            number = self._plans.appended
            self._plans.append([to_json(make(number))])
            self._plan_ids[key] = number
        return self._plan_ids[key]

    def add_graph(self, plan: Plan) -> None:
        """Takes the plan whose tasks TensorBoard's graph is to show: the first one that is given.

        Raises:
            OSError: it could not be written.
        """
        if self._events is not None:
            self._events.add_graph(plan)

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
        return max((first + count for first, count in self._pages.items()), default=0)

    def _save(self) -> None:
        """Writes the rounds of the open file, then their lines of the summary."""
        entries = self._open[: self._page_size]
        first = entries[0].recorded.index
        if unsaved := entries[self._summary.appended - first :]:
            text = f"[{','.join(entry.text for entry in entries)}]"
            replace_file(self._file(first), lambda file: write_compressed(file, text))
            self._write_scalars([entry.recorded for entry in unsaved])
            self._summary.append([to_json(RoundSummary.of(entry.recorded)) for entry in unsaved])
        self._saved_at = time.monotonic()

    def _turn_page(self) -> None:
        self._save()
        rounds = [entry.recorded for entry in self._open[: self._page_size]]
        self._write_trace(rounds)
        self._pages[rounds[0].index] = len(rounds)  # not added to a list: after an interrupt this may be done again
        del self._open[: len(rounds)]

    def _write_trace(self, rounds: list[RecordedRound]) -> None:
        """For other tools, the newest rounds again."""
        plans = self._plans_of(rounds)
        path = self.path / f"{WORKER}.{rounds[0].index:08d}.pt.trace.json.gz"  # read in the order of their text
        replace_file(path, lambda file: write_trace(file, self.info, plans, rounds))
        self._traces = [*(each for each in self._traces if each != path), path]
        while len(self._traces) > KEPT_TRACES:
            self._traces[0].unlink(missing_ok=True)
            del self._traces[0]

    def _write_scalars(self, rounds: list[RecordedRound]) -> None:
        if self._events is not None:
            self._events.add(rounds, self._plans_of(rounds))

    def _plans_of(self, rounds: list[RecordedRound]) -> dict[int, PlannedRound]:
        """By id."""
        wanted = {each.plan for each in rounds}
        missing = wanted - self._read_plans.keys()
        lines = enumerate(self._plans.read()) if missing else ()
        new = {number: PlannedRound.from_json(json.loads(line)) for number, line in lines if number in missing}
        self._read_plans = {number: plan for number, plan in self._read_plans.items() if number in wanted} | new
        return self._read_plans

    def _drop_oldest(self) -> None:
        while self._pages and sum(self._pages.values()) + len(self._open) > self._rounds:
            self._drop(*next(iter(self._pages.items())))

    def _drop(self, first: int, count: int) -> None:
        self._summary.keep(lambda line: _index_of(line) >= first + count)
        self._file(first).unlink(missing_ok=True)
        del self._pages[first]

    def _file(self, first: int) -> Path:
        """Of rounds, by the index of the first."""
        return self.path / OWN / "rounds" / f"{first:06d}.json.gz"


def _event_file(folder: Path, info: RunInfo, rounds: int) -> EventFile | None:
    try:
        from specstream.traces.events import EventFile
    except ImportError:  # the extra is not installed
        return None
    return EventFile(folder, info, rounds)


def _index_of(line: bytes) -> int:
    """The index of a summary, which is its first field."""
    found = re.match(rb'\{"index":(\d+),', line)
    assert found is not None
    return int(found[1])
