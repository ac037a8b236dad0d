"""Trials of tuning for TensorBoard's HParams: settings and rates, each trial a run.

Needs the extra `tensorboard`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.summary.writer.record_writer import RecordWriter

from specstream.traces.run_folder import new_run_folder

VERSION = "brain.Event:2"


class HParamsLog:
    """Writes a run for each trial, in a folder of the tuning's own.

    TensorBoard finds out from the runs which settings and figures there are, and of what type.
    """

    def __init__(self, logdir: str | Path, name: str) -> None:
        """Makes the folder, `path`; if there is one of that name, its name gets a number.

        Raises:
            InvalidOption: it cannot be made.
        """
        self.path = new_run_folder(logdir, name)
        self._trials = 0

    def add(self, settings: Mapping[str, int | str], figures: Mapping[str, float | None]) -> None:
        """Takes a trial; of its figures, by name, None if one is not known.

        Raises:
            OSError: it could not be written.
        """
        folder = self.path / f"trial-{self._trials:02d}"
        folder.mkdir()
        known = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items() if value is not None]
        trial = hparams.hparams_pb(dict(settings), trial_id=f"{self.path.name}/{folder.name}")
        _write(folder, [trial, Summary(value=known)])
        self._trials += 1


def _write(folder: Path, summaries: list[Any]) -> None:
    now = time.time()
    with (folder / f"events.out.tfevents.{int(now)}.specstream").open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=now, file_version=VERSION).SerializeToString())
        for summary in summaries:
            writer.write(Event(wall_time=now, step=0, summary=summary).SerializeToString())
