"""The runner of passes: the only place that validates, checks, times, counts and dumps."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specstream.errors import InvalidOption


class IR(Protocol):
    """What the runner needs of any level's IR."""

    def validate(self) -> None:
        """Raises if the IR is malformed, whatever pass it comes from."""

    def to_text(self) -> str:
        """The IR as readable text, for dumps and golden tests."""

    def op_counts(self) -> Counter[str]:
        """Operations by name."""


class Pass(Protocol):
    """A graph pass: a frozen dataclass whose fields are its options. Its file's name is its name."""

    @property
    def name(self) -> str: ...

    def run(self, ir: Any) -> Any:
        """Returns the rewritten IR; the input is not used afterwards."""

    def check(self, ir: Any) -> None:
        """Raises if what the pass promises does not hold of its result."""


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    milliseconds: float
    op_changes: dict[str, int]
    """Operations added (positive) or removed (negative), by name."""


def _dump_dir() -> Path | None:
    path = os.environ.get("SPECSTREAM_DUMP")
    return Path(path) if path else None


@dataclass
class PassRunner:
    """Runs passes in order and keeps a record of each.

    With `dump_dir` (default: the environment variable SPECSTREAM_DUMP) the IR is written before the first
    pass and after each, as numbered text files under `dump_dir/title`.
    """

    title: str
    dump_dir: Path | None = field(default_factory=_dump_dir)
    records: list[PassRecord] = field(default_factory=list)

    def run(self, passes: Sequence[Pass], ir: Any) -> Any:
        for after in self.steps(passes, ir):
            ir = after
        return ir

    def steps(self, passes: Sequence[Pass], ir: Any) -> Iterator[Any]:
        """The IR after each pass, for whoever has other things to do in between."""
        self._dump("input", ir)
        after = ir.op_counts()
        for step in passes:
            before = after
            start = time.perf_counter()
            ir = step.run(ir)
            elapsed = (time.perf_counter() - start) * 1e3
            ir.validate()
            step.check(ir)
            after = ir.op_counts()
            changes = {op: after[op] - before[op] for op in sorted(before | after) if after[op] != before[op]}
            self.records.append(PassRecord(step.name, elapsed, changes))
            self._dump(step.name, ir)
            yield ir

    def _dump(self, label: str, ir: IR) -> None:
        if self.dump_dir is None:
            return
        folder = self.dump_dir / self.title
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{len(self.records):02d}_{label}.txt").write_text(ir.to_text(), encoding="utf-8")
        except OSError as error:
            allowed = f"a directory that can be made and written ({error.strerror})"
            way_out = "Name another one, or unset it."
            raise InvalidOption("SPECSTREAM_DUMP", str(self.dump_dir), allowed, way_out) from error
