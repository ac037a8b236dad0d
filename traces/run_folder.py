"""Folders and files of a run: made without overwriting anything, written so that readers never see half of a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import BinaryIO

from specstream.errors import InvalidOption

OWN = "specstream"
"""The folder in a run's that holds what is ours; what is in one is no run."""
MOST_NAME_BYTES = 240
"""File systems take 255; a number may be added."""


def new_run_folder(logdir: str | Path, name: str) -> Path:
    """Makes `<logdir>/<name>`; if that is there, `<name>-2`, and so on.

    Raises:
        InvalidOption: no run can have that name, or the folder cannot be made or written to.
    """
    if not isinstance(logdir, str | Path) or logdir == "":
        raise InvalidOption("logdir", logdir, 'a folder, as text or a Path; "." is the current one')
    parts = PurePath(name).parts if isinstance(name, str) else ()
    longest = max((len(part.encode(errors="surrogatepass")) for part in parts), default=0)
    if longest > MOST_NAME_BYTES:
        allowed = f"a name of at most {MOST_NAME_BYTES} bytes, in each of its folders"
        raise InvalidOption("run", name, allowed, "Leave it out, and it is the time.")
    if not parts or PurePath(name).is_absolute() or {"..", OWN} & {*parts} or "\0" in name:
        allowed = f'the name of a folder in logdir, or of one in it, such as "cpu/first", but not "{OWN}"'
        raise InvalidOption("run", name, allowed, "Leave it out, and it is the time.")
    wanted = Path(logdir) / name
    try:
        wanted = Path(logdir).expanduser() / name
        wanted.parent.mkdir(parents=True, exist_ok=True)
        folder = _first_free(wanted)
        (folder / OWN).mkdir()
    except (OSError, ValueError, RuntimeError) as error:  # the last: a home that nobody has
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidOption("logdir", str(logdir), "a folder that can be written to", f"{wanted}: {reason}.") from error
    return folder


def _first_free(wanted: Path) -> Path:
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        else:
            return folder


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file beside `path`, then puts it in its place."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            write(file)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


class Lines:
    """A file of lines, for records in JSON. What an interrupted `append` has left is overwritten by the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int | None, int] = (0, 0)
        """Where whole lines end, None: wherever the file does; and how many lines were appended. Set together."""
        path.touch(exist_ok=False)

    @property
    def appended(self) -> int:
        """How many lines, those included that are no longer kept."""
        return self._state[1]

    def append(self, lines: Sequence[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        end, appended = self._state
        with self.path.open("r+b") as file:
            start = file.seek(0, os.SEEK_END) if end is None else file.seek(end)
            self._state = start, appended
            file.truncate()
            file.write(data)
        self._state = start + len(data), appended + len(lines)

    def read(self) -> list[bytes]:
        return self.path.read_bytes()[: self._state[0]].splitlines(keepends=True)

    def keep(self, wanted: Callable[[bytes], bool]) -> None:
        """Drops all other lines, in one step."""
        lines = [line for line in self.read() if wanted(line)]
        with self.path.open("r+b") as file:  # so that the old file, too, ends with a whole line
            file.truncate(self._state[0])
        self._state = None, self.appended
        replace_file(self.path, lambda file: file.writelines(lines))
