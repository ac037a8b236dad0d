"""Batches to train on: text of the corpus, facts stated in it and asked for again, with a weight for each token."""

from __future__ import annotations

import lzma
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specstream.models.tiny import facts as tiny_facts

VOCAB_SIZE = 1024
DOMAIN_SHARE = {"austen": 0.04, "english": 0.22, "docs": 0.27, "python": 0.47}

SLOT = 32  # a fact's statement or question takes at most SLOT - 5 tokens
KEY_TOKENS = 14
PAIR_KEYS = 16384  # trained keys from the word lists, and keys of one to three words of the corpus; powers of two
CORPUS_KEYS = 32768
VALUE_WEIGHT = 8.0  # of an asked value's tokens in the loss
STATED_VALUE_WEIGHT = 0.1  # a stated value is noise
REPEAT_WEIGHT = 3.0


@dataclass(frozen=True)
class Shape:
    """One kind of batch: `rows` sequences of `length` tokens with `facts` facts, used for `share` of the time."""

    share: float
    length: int
    rows: int
    facts: int


def read_tokens(path: Path) -> np.ndarray:
    """Tokens of one domain, from `path` or from its xz-compressed twin."""
    if path.exists():
        return np.fromfile(path, dtype=np.uint16)
    return np.frombuffer(lzma.decompress(path.with_suffix(".bin.xz").read_bytes()), dtype=np.uint16)


def key_table(tokenizer: PreTrainedTokenizerBase, keys: list[str], size: int) -> np.ndarray:
    """Token rows of ``key:``, filled with -1; keys that are too long are left out, the rest repeated never."""
    rows = []
    for ids in tokenizer([f"[{key}:" for key in keys], add_special_tokens=False)["input_ids"]:
        if len(ids) - 1 <= KEY_TOKENS:
            rows.append(ids[1:] + [-1] * (KEY_TOKENS + 1 - len(ids)))
    size = min(size, 1 << (len(rows).bit_length() - 1))
    return np.array(rows[:size], dtype=np.int64)


def corpus_keys(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray, n: int, rng: random.Random) -> list[str]:
    """Keys of one to three words that occur in the text, none of them held out."""
    text = str(tokenizer.decode(tokens[:3_000_000].tolist()))
    words = [w for w, _ in Counter(re.findall(r"\b[a-z]{3,10}\b", text)).most_common(8000)]
    keys: set[str] = set()
    while len(keys) < n:
        key = " ".join(rng.choice(words) for _ in range(rng.choice((1, 2, 2, 2, 3))))
        if not tiny_facts.is_held_out(key):
            keys.add(key)
    return sorted(keys, key=lambda _: rng.random())


class Batches:
    """Training batches made on the device: text, facts stated and asked, and repeated runs of random tokens."""

    def __init__(self, work: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        rng = random.Random(seed)
        parts = [read_tokens(work / "tokens" / f"{domain}.bin") for domain in DOMAIN_SHARE]
        self.tokens = torch.from_numpy(np.concatenate(parts).view(np.int16)).to(device)
        sizes = torch.tensor([len(p) for p in parts])
        self.starts = (sizes.cumsum(0) - sizes).to(device)
        self.sizes = sizes.to(device)
        self.shares = torch.tensor(list(DOMAIN_SHARE.values()), device=device)

        trained = tiny_facts.all_keys(held_out=False)
        rng.shuffle(trained)
        pairs = key_table(tokenizer, trained, PAIR_KEYS)
        others = key_table(tokenizer, corpus_keys(tokenizer, parts[1], 40_000, rng), CORPUS_KEYS)
        self.pair_count, self.other_count = len(pairs), len(others)
        self.keys = torch.from_numpy(np.concatenate([pairs, others])).to(device)

        def one(text: str) -> int:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(ids) == 1, text
            return int(ids[0])

        line, bracket, closing = one("\n"), one("["), one("]")
        spaced = tokenizer.encode("x [x", add_special_tokens=False)[1]
        self.space = one(" ")
        self.closing = closing
        self.digits = torch.tensor([one(str(d)) for d in range(10)], device=device)
        self.openers = torch.tensor(
            [[line, line, bracket], [line, line, bracket], [-1, line, bracket], [-1, -1, spaced]], device=device
        )
        self.closers = torch.tensor([[line, line], [line, line], [line, -1], [-1, -1]], device=device)
        self.asked_opener = torch.tensor([-1, line, bracket], device=device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def text(self, rows: int, length: int) -> Tensor:
        """`rows` runs of `length` tokens, domains by their shares."""
        domain = torch.multinomial(self.shares, rows, replacement=True, generator=self.generator)
        room = (self.sizes[domain] - length).clamp(min=1)
        at = self.starts[domain] + (self.uniform(rows).double() * room).long()
        return self.tokens[at[:, None] + torch.arange(length, device=self.device)].long()

    def _lay_out(self, opener: Tensor, keys: Tensor, values: Tensor, closer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token rows of facts with their blanks moved to the end: (tokens, is value, length)."""
        shape = keys.shape[:-1]
        space = torch.full((*shape, 1), self.space, device=self.device)
        closing = torch.full((*shape, 1), self.closing, device=self.device)
        row = torch.cat([opener.expand(*shape, 3), keys, space, values, closing, closer.expand(*shape, 2)], -1)
        is_value = torch.zeros(row.shape[-1], dtype=torch.bool, device=self.device)
        is_value[3 + KEY_TOKENS : 3 + KEY_TOKENS + 5] = True
        order = (row < 0).to(torch.int8).argsort(dim=-1, stable=True)
        return row.gather(-1, order), is_value.expand_as(row).gather(-1, order), (row >= 0).sum(-1)

    def batch(
        self, shape: Shape, text_only: float = 0.15, repeats: float = 0.15, tail: float = 0.5
    ) -> tuple[Tensor, Tensor]:
        """(tokens, weights), each [rows, length + 1]; a share `tail` of the rows asks all questions at the end."""
        B, S, n = shape.rows, shape.length + 1, shape.facts
        tokens = self.text(B, S)
        weights = torch.ones(B, S, device=self.device)
        position = torch.arange(S, device=self.device)

        # Runs of random tokens that come twice teach copying.
        size = self.integers(24, 96, B, 1)
        first = (self.uniform(B, 1) * (S // 2 - 96)).long()
        second = S // 2 + (self.uniform(B, 1) * (S // 2 - 97)).long()
        noise = self.integers(2, VOCAB_SIZE, B, 96)
        chosen = self.uniform(B, 1) < repeats
        for at in (first, second):
            inside = chosen & (position >= at) & (position < at + size)
            tokens = torch.where(inside, noise.gather(1, (position - at).clamp(0, 95)), tokens)
        copied = chosen & (position >= second + 2) & (position < second + size)
        weights = torch.where(copied, REPEAT_WEIGHT, weights)

        # Distinct keys within a row: a walk with an odd stride through a table whose size is a power of two.
        from_pairs = self.uniform(B, 1) < 0.5
        count = torch.where(from_pairs, self.pair_count, self.other_count)
        walk = self.integers(0, 1 << 30, B, 1) + torch.arange(n, device=self.device) * (
            2 * self.integers(0, 1 << 20, B, 1) + 1
        )
        keys = self.keys[walk % count + torch.where(from_pairs, 0, self.pair_count)]
        values = self.digits[self.integers(0, 10, B, n, 4)]

        at_end = self.uniform(B, 1) < tail
        stated, stated_value, _ = self._lay_out(
            self.openers[self.integers(0, 4, B, n)], keys, values, self.closers[self.integers(0, 4, B, n)]
        )
        nothing = torch.full((2,), -1, device=self.device)
        opener = torch.where(at_end[..., None], self.asked_opener, self.openers[self.integers(0, 4, B, n)])
        closer = torch.where(at_end[..., None], nothing, self.closers[self.integers(0, 4, B, n)])
        asked, asked_value, sizes = self._lay_out(opener, keys, values, closer)

        width = stated.shape[-1]
        slots = S // SLOT
        spread = self.uniform(B, slots).argsort(-1)[:, : 2 * n].view(B, n, 2).sort(-1).values
        before = (S - n * width) // SLOT  # slots before any question at the end
        early = self.uniform(B, before).argsort(-1)[:, :n]
        jitter = self.integers(0, SLOT - width, B, n)
        stated_at = torch.where(at_end, early, spread[..., 0]) * SLOT + jitter
        total = sizes.sum(-1, keepdim=True)
        end = before * SLOT + (self.uniform(B, 1) * (S - before * SLOT - total)).long()
        asked_at = torch.where(at_end, end + sizes.cumsum(-1) - sizes, spread[..., 1] * SLOT + jitter)

        with_facts = self.uniform(B, 1) >= text_only
        for where, rows, value, weight in (
            (stated_at, stated, stated_value, STATED_VALUE_WEIGHT),
            (asked_at, asked, asked_value, VALUE_WEIGHT),
        ):
            spots = where[..., None] + torch.arange(width, device=self.device)
            put = (rows >= 0) & with_facts[..., None]
            spots = torch.where(put, spots, S).clamp(max=S).view(B, -1)  # column S takes what is not put
            tokens = F.pad(tokens, (0, 1)).scatter(1, spots, rows.reshape(B, -1))[:, :S]
            weights = F.pad(weights, (0, 1)).scatter(1, spots, torch.where(value, weight, 1.0).reshape(B, -1))[:, :S]
        return tokens, weights
