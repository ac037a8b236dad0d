"""Writes a run while it runs, so that it can be read meanwhile, and also if the process dies.

What is on disk at any moment fits together: a round that `summary.jsonl` names is in a file of `rounds/`, and its plan
is in `plans.jsonl`. A process that is killed loses the rounds of a few seconds.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specstream.errors import InvalidOption
from specstream.round_plan import Plan
from specstream.traces.chrome import MOST_ROUNDS, Trace
from specstream.traces.packed_text import PackedText
from specstream.traces.records import PlannedRound, RecordedRound, RoundSummary, RunInfo, to_json
from specstream.traces.run_folder import OWN, Lines, new_run_folder, replace_file
from specstream.traces.run_reader import RunReader

if TYPE_CHECKING:
    from specstream.traces.events import EventFile

KEPT_ROUNDS = 2000
KEPT_TRACES = 2
"""Files for other tools, which read every one of them as a whole."""
KNOWN_PLANS = 16
"""That are kept in memory, where others are read from the file again."""
SECONDS_BETWEEN_SAVES = 2.0
WORKER = "specstream"
"""Under which name other tools list the run."""


class _Page:
    """What is written of rounds that follow one another, in files that grow with them."""

    def __init__(self, first: int, info: RunInfo) -> None:
        self.first = first
        """Index of the first round."""
        self.rounds, self.trace = PackedText("[", "]"), Trace(info)

    def add(self, recorded: RecordedRound, plan: PlannedRound) -> None:
        """Takes the next round; if it was interrupted, what of it is not there yet."""
        place = recorded.index - self.first
        if self.rounds.count == place:
            self.rounds.add(f"{',' if place else ''}{to_json(recorded)}")
        if self.trace.count == place:
            self.trace.add_round(recorded, plan)


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
        self._open: list[RecordedRound] = []
        """The rounds of the file that is not full yet."""
        self._page = _Page(0, self.info)
        """That file."""
        self._saved_at = time.monotonic()
        self._traces: list[Path] = []
        self._known_plans: OrderedDict[int, PlannedRound] = OrderedDict()
        """Those that were wanted last."""
        self._reader = RunReader(self.path)
        """For the others."""
        self._events = _event_file(self.path, self.info, rounds)

    def plan_id(self, key: Hashable, make: Callable[[int], PlannedRound]) -> int:
        """The id of a plan, which is made and written when its key is new."""
        if key not in self._plan_ids:
            number = self._plans.appended
            plan = make(number)
            self._plans.append([to_json(plan)])
            self._plan_ids[key] = number
            self._remember(plan)
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
            self._open.append(recorded)
        while len(self._open) > self._page_size:
            self._turn_page()
        self._drop_oldest()
        if not self._open:
            return
        self._fill_page()
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
            return self._open[-1].index + 1
        return max((first + count for first, count in self._pages.items()), default=0)

    def _save(self) -> None:
        """Writes the rounds of the open file, then their lines of the summary."""
        rounds, page = self._open[: self._page_size], self._fill_page()
        if unsaved := rounds[self._summary.appended - page.first :]:
            replace_file(self._file(page.first), page.rounds.write)
            self._summary.append([to_json(RoundSummary.of(recorded)) for recorded in unsaved])
        self._saved_at = time.monotonic()

    def _turn_page(self) -> None:
        self._save()
        page = self._page
        self._write_trace(page)
        self._pages[page.first] = page.rounds.count  # not added to a list: after an interrupt this may be done again
        del self._open[: page.rounds.count]

    def _fill_page(self) -> _Page:
        """The file that is not full yet, with all its rounds."""
        first = self._open[0].index
        if self._page.first != first:
            self._page = _Page(first, self.info)
        for recorded in self._open[self._page.trace.count : self._page_size]:
            plan = self._plan(recorded.plan)
            if self._events is not None:
                self._events.add(recorded, plan)
            self._page.add(recorded, plan)
        return self._page

    def _write_trace(self, page: _Page) -> None:
        """For other tools, the newest rounds again."""
        path = self.path / f"{WORKER}.{page.first:08d}.pt.trace.json.gz"  # read in the order of their text
        replace_file(path, page.trace.write)
        self._traces = [*(each for each in self._traces if each != path), path]
        while len(self._traces) > KEPT_TRACES:
            self._traces[0].unlink(missing_ok=True)
            del self._traces[0]

    def _plan(self, number: int) -> PlannedRound:
        if number not in self._known_plans:
            self._remember(self._reader.plan(number))
        self._known_plans.move_to_end(number)
        return self._known_plans[number]

    def _remember(self, plan: PlannedRound) -> None:
        self._known_plans[plan.id] = plan
        if len(self._known_plans) > KNOWN_PLANS:
            self._known_plans.popitem(last=False)

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
