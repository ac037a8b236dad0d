"""Prompts of real text, for what random tokens cannot show: how often candidates are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specstream.cli import UsageError
from specstream.models.tiny import TEXT

NOVEL = TEXT / "persuasion.txt"
"""Which every checkout has."""


def text_prompts(tokenizer: Any, file: Path, count: int, tokens: int) -> list[list[int]]:
    """Parts of a text as token ids [count][tokens], spread over it evenly; they overlap where it is too short for all.

    Raises:
        UsageError: it is too short for one.
    """
    text = file.read_text(encoding="utf-8")
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < tokens:
        raise UsageError(f"{file}: a text of {len(ids)} tokens is too short for a prompt of {tokens}")
    starts = [(len(ids) - tokens) * index // max(1, count - 1) for index in range(count)]
    return [ids[start : start + tokens] for start in starts]
