"""Text from tokens as they come."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer shows bytes that are no character, or not yet."""


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of tokens, without special ones."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Tokens in, text out; the parts joined are the text of all the tokens.

    A character may span several tokens (CJK, emoji): while it is unfinished, it is held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0  # tokens from here on are decoded together
        self._certain = 0  # the text of the tokens before this one cannot change any more
        self._shown = 0  # characters shown of what is decoded together

    def push(self, token_ids: list[int]) -> str:
        """Text that is certain now."""
        self._token_ids += token_ids
        text = self._decode_from(self._start)
        unfinished = len(text) - len(text.rstrip(UNFINISHED))
        certain = max(self._shown, len(text) - min(unfinished, 3))  # a character has at most four bytes
        part, self._shown = text[self._shown : certain], certain
        if not unfinished:  # go on from here; the last part is decoded again, as context
            self._start, self._certain = self._certain, len(self._token_ids)
            self._shown = len(self._decode_from(self._start))
        return part

    def finish(self) -> str:
        """The rest."""
        return self._decode_from(self._start)[self._shown :]

    def _decode_from(self, start: int) -> str:
        return decode(self._tokenizer, self._token_ids[start:])
