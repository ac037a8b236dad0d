"""Compressed text that grows: whole whenever it is written, and each part in it once."""

from __future__ import annotations

import gzip
import io

import pytest

from specstream.traces.packed_text import PackedText


def written(text: PackedText) -> bytes:
    file = io.BytesIO()
    text.write(file)
    return file.getvalue()


def test_it_can_be_written_at_any_moment_and_go_on() -> None:
    text, expected = PackedText("[", "]"), "["
    for number in range(20):
        assert gzip.decompress(written(text)).decode() == expected + "]"
        assert text.count == number
        part = f"{number} \u00e9" * 1000
        text.add(part)
        expected += part
    other = PackedText("[", "]")
    other.add(expected[1:])
    assert gzip.decompress(written(other)) == gzip.decompress(written(text))
    assert written(text) == written(text)
    assert len(written(text)) < len(expected) / 10


def test_an_interrupted_part_is_not_there() -> None:
    text = PackedText("a", "z")
    text.add("b")
    before = written(text)

    class Part(str):
        def encode(self, *_: str) -> bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text.add(Part("c"))
    assert (written(text), text.count) == (before, 1)
    text.add("c")
    assert gzip.decompress(written(text)) == b"abcz"
