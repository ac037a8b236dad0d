"""From the archives of the corpus's sources to documents: names and plain text."""

from __future__ import annotations

import gzip
import html.parser
import io
import json
import re
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from sources import Source

PLAIN_MARKS = (("\u201c", '"'), ("\u201d", '"'), ("\u2018", "'"), ("\u2019", "'"), ("\u2014", "--"), ("\u00b6", ""))

Document = tuple[str, str]  # name, text


def members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of an archive's regular files whose path is wanted, in name order for zip files."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in sorted(wheel.infolist(), key=lambda i: i.filename):
                if wanted(info.filename):
                    yield info.filename, wheel.read(info)
        return
    if archive.suffix == ".deb":
        packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], check=True, capture_output=True).stdout
    else:
        packed = archive.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar:
            if member.isfile() and wanted(member.name):
                handle = tar.extractfile(member)
                if handle is not None:
                    yield member.name, handle.read()


class _HtmlText(html.parser.HTMLParser):
    """Visible text of an HTML page; block elements break lines, preformatted text keeps its own."""

    SKIP = frozenset({"script", "style", "nav", "head", "svg", "footer", "button"})
    BLOCK = frozenset(
        {"p", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "h1", "h2", "h3", "h4", "h5", "section", "pre"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = 0
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SKIP:
            self.skipping += 1
        if tag in self.BLOCK:
            self.parts.append("\n\n" if tag in {"p", "h1", "h2", "h3", "h4", "pre"} else "\n")
        if tag == "br":
            self.parts.append("\n")
        self.preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIP:
            self.skipping = max(0, self.skipping - 1)
        if tag in self.BLOCK:
            self.parts.append("\n")
        if tag == "pre":
            self.preformatted = max(0, self.preformatted - 1)

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def html_to_text(page: str) -> str:
    parser = _HtmlText()
    parser.feed(page)
    return "".join(parser.parts)


def inflate_all(data: bytes) -> bytes:
    """All zlib streams that lie in `data`, inflated and joined; bytes between them are skipped."""
    out = []
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        try:
            out.append(stream.decompress(data[at:]))
        except zlib.error:
            at += 1
            continue
        at = len(data) - len(stream.unused_data)
    return b"".join(out)


def sword_to_text(data: bytes) -> str:
    """A SWORD module's compressed OSIS text, without its markup."""
    text = inflate_all(data).decode("utf8", "replace")
    text = re.sub(r"<(?:lb|p|/p|/lg|/title|/chapter)\b[^>]*>|</div>|<div [^>]*>", "\n", text)
    text = re.sub(r"<note\b.*?</note>", "", text, flags=re.S)
    text = re.sub(r"<[^>]+>", "", text).replace("\x00", "")
    for mark, plain in PLAIN_MARKS:
        text = text.replace(mark, plain)
    return re.sub(r"\n ", "\n", re.sub(r"[ \t]+", " ", html.unescape(text)))


def austen_novels(data: bytes) -> Iterator[Document]:
    """The novels in an R lazy-load database: each record is one zlib stream holding a serialised vector of lines."""
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        record = stream.decompress(data[at + 4 :])  # four bytes of length come first
        at = len(data) - len(stream.unused_data)
        if len(record) < 100_000:
            continue
        where = record.index(b"\x00\x00\x00\x10") + 4  # the string vector's type; its length follows
        count = int.from_bytes(record[where : where + 4], "big")
        where += 4
        lines = []
        for _ in range(count):
            size = int.from_bytes(record[where + 4 : where + 8], "big")  # after four bytes of string flags
            lines.append(record[where + 8 : where + 8 + size].decode("utf8", "replace"))
            where += 8 + size
        yield next(line for line in lines if line), "\n".join(lines)


def factbook_to_text(data: bytes) -> str:
    """Country pages: every heading with the text below it."""
    lines: list[str] = []

    def walk(node: object, path: list[str]) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "text" and isinstance(value, str):
                    lines.append(f"{' - '.join(path)}: {value.replace(' ++ ', ' ')}")
                else:
                    walk(value, [*path, str(key)][-2:])

    walk(json.loads(data), [])
    return "\n".join(lines)


def wordnet_to_text(data: bytes) -> str:
    """Words and their glosses, one per line."""
    lines = []
    for line in data.decode("latin-1").splitlines():
        if line.startswith(" ") or "|" not in line:
            continue
        fields, gloss = line.split("|", 1)
        lines.append(f"{fields.split()[4].replace('_', ' ')}: {gloss.strip()}")
    return "\n".join(lines)


def documents_of(source: Source, archive: Path) -> Iterator[Document]:
    """The documents of one source as (name, text)."""
    pattern = re.compile(source.pattern)
    for name, data in members(archive, lambda n: pattern.search(n) is not None):
        name = f"{source.name}/{name.removeprefix('./')}"
        if name.endswith((".gz", ".dz")):
            data = gzip.decompress(data)
        if source.reader == "austen":
            yield from austen_novels(data)
        elif source.reader == "sword":
            text = sword_to_text(data)
            for i in range(0, len(text), 60_000):
                yield f"{name}#{i}", text[i : i + 60_000]
        elif source.reader == "wordnet":
            text = wordnet_to_text(data)
            for i in range(0, len(text), 60_000):
                yield f"{name}#{i}", text[i : i + 60_000]
        elif source.reader == "factbook":
            yield name, factbook_to_text(data)
        else:
            try:
                text = data.decode("utf8")
            except UnicodeDecodeError:
                text = data.decode("latin-1")
            yield name, html_to_text(text) if source.reader == "html" else text
