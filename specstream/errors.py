"""Errors a user can meet. Each says what was wrong, what is allowed, what was given and the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MOST_CHARACTERS = 160
"""Of a value that a message shows."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a line that tracebacks show below the error from Python 3.11 on; in 3.10 it is only kept."""
    noted: Any = error
    notes: list[str] = getattr(noted, "__notes__", [])
    if note not in notes:  # the same error may be raised again
        noted.__notes__ = [*notes, note]  # what BaseException.add_note does


class SpecStreamError(Exception):
    """Base of every error SpecStream raises on purpose."""


class SpecStreamWarning(UserWarning):
    """What a user should know of a model pair or a request; no text is affected."""


class UnsupportedModel(SpecStreamError):
    """The model cannot be captured exactly.

    Args:
        module: dotted name of the module at fault ("" for the model itself).
        reason: what it does that SpecStream cannot represent exactly.
        way_out: what the user can do about it.
    """

    def __init__(self, module: str, reason: str, way_out: str) -> None:
        self.module, self.reason, self.way_out = module, reason, way_out
        super().__init__(f"{module or 'the model'}: {reason}. {way_out}")


class InvalidOption(SpecStreamError, ValueError):
    """An option or an argument has a value that cannot be honoured."""

    def __init__(self, name: str, given: object, allowed: str, way_out: str = "") -> None:
        self.name, self.given, self.allowed, self.way_out = name, given, allowed, way_out
        tail = f" {way_out}" if way_out else ""
        super().__init__(f"{name}: got {shortened(repr(given))}; allowed: {allowed}.{tail}")

    def renamed(self, names: Mapping[str, str]) -> InvalidOption:
        """The same with other names for options, also where it says what is allowed beside which."""
        allowed = self.allowed
        for name, other in names.items():
            allowed = allowed.replace(f"{name}=", f"{other}=")
        return InvalidOption(names.get(self.name, self.name), self.given, allowed, self.way_out)


def shortened(text: str) -> str:
    """A text in one line, not too long: a prompt of many thousand tokens would hide what is wrong with it."""
    line = re.sub(" at 0x[0-9a-f]+", "", " ".join(text.split()))
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ..."


class OutOfBudget(SpecStreamError):
    """The memory plan does not fit.

    Args:
        reason: the figures.
        way_out: the options that would fit.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        self.reason, self.way_out = reason, way_out
        super().__init__(f"{reason}. {way_out}" if way_out else reason)


class InvalidPlan(SpecStreamError):
    """A plan that `Plan.check` refuses, with the conflicting tasks in the text."""


class MissingExtra(SpecStreamError, ImportError):
    """A package is not installed that an extra of SpecStream brings.

    Args:
        what: what needs it.
        package: its name.
        extra: the extra that has it.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed, which {what} need: pip install "specstream[{extra}]"')


class InvalidDistribution(SpecStreamError):
    """No token can be chosen for a request: its processed scores hold NaN or, if it samples, are no distribution.

    Args:
        position: of the token, in the text with its prompt.
        reason: what the scores are.
        way_out: what the user can do about it.
    """

    def __init__(self, request_id: int, position: int, reason: str, way_out: str) -> None:
        self.request_id, self.position, self.reason, self.way_out = request_id, position, reason, way_out
        super().__init__(
            f"request {request_id}: no token can be chosen at position {position} (the prompt's first token is at 0): "
            f"{reason}. {way_out}"
        )


class EngineClosed(SpecStreamError):
    """The engine was closed and can serve no more requests."""


class EngineBusy(SpecStreamError):
    """Another call of the engine is under way: in another thread, or further up in this one."""

    def __init__(self) -> None:
        super().__init__(
            "the engine is in use, by another thread or by a call of it further up; call it from one at a time "
            "(requests run together when they are submitted, or given to generate as a batch)"
        )
