"""The runner of passes: the only place that validates, checks, times, counts and dumps."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from specstream.errors import InvalidOption
from specstream.pieces import Pieces, finish, in_larger_pieces, timed

After = TypeVar("After")
"""The IR that a pass makes."""


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


class LongPass(ABC, Generic[After]):
    """A pass that may be left for a while in its midst."""

    @abstractmethod
    def pieces(self, ir: Any) -> Pieces[After]:
        """Its work, which returns what `run` does."""

    def run(self, ir: Any) -> After:
        return finish(self.pieces(ir))


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    milliseconds: float
    op_changes: dict[str, int]
    """Operations added (positive) or removed (negative), by name."""


def _run(step: Pass, ir: Any) -> Pieces[Any]:
    if isinstance(step, LongPass):
        return (yield from in_larger_pieces(step.pieces(ir)))
    return step.run(ir)


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
        return finish(self.pieces(passes, ir))

    def pieces(self, passes: Sequence[Pass], ir: Any) -> Pieces[Any]:
        """The same for whoever has other things to do between two passes, and in the midst of long ones."""
        self._dump("input", ir)
        after = ir.op_counts()
        for step in passes:
            before = after
            ir, seconds = yield from timed(_run(step, ir))
            yield
            ir.validate()
            step.check(ir)
            after = ir.op_counts()
            changes = {op: after[op] - before[op] for op in sorted(before | after) if after[op] != before[op]}
            self.records.append(PassRecord(step.name, 1e3 * seconds, changes))
            self._dump(step.name, ir)
            yield
        return ir

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
