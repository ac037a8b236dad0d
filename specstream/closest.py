"""What a word that is none of those allowed may have been meant for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LEAST_ALIKE = 0.6
"""By difflib: "slef" is 0.75 alike "self", "gpt2" 0.4 alike "tiny" at most."""


def closest(given: object, words: Iterable[str], least_alike: float = LEAST_ALIKE) -> str | None:
    """The word that is most like what was given, in upper or lower case; None if none is alike."""
    if not isinstance(given, str):
        return None
    lower = {word.lower(): word for word in words}
    return next((lower[each] for each in difflib.get_close_matches(given.lower(), lower, 1, least_alike)), None)


def did_you_mean(given: object, words: Iterable[str], least_alike: float = LEAST_ALIKE) -> str:
    """A question for a message; "" if no word is alike."""
    word = closest(given, words, least_alike)
    return "" if word is None else f"Did you mean {word!r}?"
