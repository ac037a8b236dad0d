"""Train the bundled tiny pair: first the target on text with facts, then the draft on what the target says.

    python tools/tiny_pair/train.py target --work DIR --out DIR/target --seconds 515
    python tools/tiny_pair/train.py draft --work DIR --target DIR/target --out DIR/short --seconds 440
    python tools/tiny_pair/train.py draft --work DIR --target DIR/target --start DIR/short --out DIR/draft \\
        --seconds 215 --rate 1.5e-3 --pool-rounds 4 --seed 2

`--work` is the folder that corpus.py filled. Learning rates and stages follow the wall clock, so a run always ends
annealed; it is therefore reproducible in its data and seeds, not bit for bit. `--smoke` shrinks everything to a few
seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specstream.models.tiny import facts as tiny_facts
from specstream.models.tiny import measure

VOCAB_SIZE = 1024
MAX_POSITIONS = 32768
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


TARGET_STAGES = (
    Shape(0.22, 512, 256, 6),
    Shape(0.20, 1024, 128, 8),
    Shape(0.34, 4096, 32, 20),
    Shape(0.24, 16384, 8, 40),
)
DRAFT_SHAPES = (Shape(0.90, 512, 256, 4), Shape(0.10, 8192, 16, 20))
POOL_SHARE = 0.60  # of the draft's steps: on the target's own continuations
LONG_DRAFT_SHAPES = (Shape(0.27, 512, 256, 4), Shape(0.73, 17408, 7, 24))  # with --start
LONG_POOL_SHARE = 0.45
POOL_ROWS, POOL_PROMPT, POOL_NEW = 4096, 320, 192
SMOKE_STAGES = (Shape(0.5, 512, 2, 6), Shape(0.5, 1024, 1, 8))


def target_config(smoke: bool) -> Qwen3Config:
    """Six layers of width 384: 9.83 million parameters."""
    return qwen3(64, 2, 2, 1, 128) if smoke else qwen3(384, 6, 6, 2, 1024)


def draft_config(smoke: bool) -> Qwen3Config:
    """Three layers of width 192: 1.43 million parameters."""
    return qwen3(64, 1, 2, 1, 64) if smoke else qwen3(192, 3, 3, 1, 544)


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


# ---------------------------------------------------------------- batches


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


# ---------------------------------------------------------------- training


def optimizer(model: PreTrainedModel, device: torch.device) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=device.type == "cuda")


def set_rate(opt: torch.optim.Optimizer, peak: float, step: int, progress: float) -> None:
    rate = peak * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
    for group in opt.param_groups:
        group["lr"] = rate


def compile_layers(model: PreTrainedModel, device: torch.device) -> None:
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)


def update(model: PreTrainedModel, opt: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)


def weighted_loss(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def distillation_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Half divergence from the teacher's distribution, half cross-entropy with its greedy choice."""
    ours = logits.float().log_softmax(-1)
    theirs = teacher.float().log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    choice = F.nll_loss(ours.flatten(0, 1), theirs.argmax(-1).flatten())
    return 0.5 * divergence + 0.5 * choice


def place(model: PreTrainedModel, where: torch.device | torch.dtype) -> PreTrainedModel:
    """The model, moved or cast in place."""
    torch.nn.Module.to(model, where)
    return model


def save(model: PreTrainedModel, tokenizer_dir: Path, out: Path) -> None:
    """Write the model in bfloat16, in files below 10 MB, with its tokenizer and generation settings."""
    shutil.rmtree(out, ignore_errors=True)
    assert isinstance(model.config, Qwen3Config)
    plain = place(Qwen3ForCausalLM(model.config), torch.bfloat16)
    plain.load_state_dict({k: v.to(torch.bfloat16).cpu() for k, v in model.state_dict().items()})
    plain.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=1)
    plain.save_pretrained(out, max_shard_size="9MB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_dir / file, out / file)


def train_target(args: argparse.Namespace, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> None:
    batches = Batches(args.work, tokenizer, device, args.seed)
    model = place(Qwen3ForCausalLM(target_config(args.smoke)), device)
    compile_layers(model, device)
    loss_of = torch.compile(weighted_loss, dynamic=False) if device.type == "cuda" else weighted_loss
    opt = optimizer(model, device)
    print(f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    began = time.monotonic()
    step = seen = 0
    until = 0.0
    for shape in SMOKE_STAGES if args.smoke else TARGET_STAGES:
        until += shape.share
        while (progress := (time.monotonic() - began) / args.seconds) < until:
            tokens, weights = batches.batch(shape, repeats=0.15 if shape.length <= 1024 else 0.05)
            set_rate(opt, args.rate or 2e-3, step, progress)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = loss_of(logits, tokens[:, 1:], weights[:, 1:])
            update(model, opt, loss)
            step += 1
            seen += shape.rows * shape.length
            if step % 100 == 0 or args.smoke:
                spent = time.monotonic() - began
                print(
                    f"{spent:.0f}s step {step} length {shape.length} loss {loss.item():.3f} {seen / spent:.0f} tok/s",
                    flush=True,
                )
        save(model, args.work / "tokenizer", args.out)
        if not args.smoke:
            copy = place(AutoModelForCausalLM.from_pretrained(args.out), device).eval()
            with torch.compiler.set_stance("force_eager"):
                found = [measure.recall(copy, tokenizer, length, 64)["recall"] for length in (512, 1024, 4096, 16384)]
            print(f"after length {shape.length}: recall at 512, 1024, 4096, 16384: {found}", flush=True)
    print(f"target: {step} steps, {seen / 1e6:.0f}M tokens in {time.monotonic() - began:.0f}s", flush=True)


def attend_grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention; for one new token the query heads of a group are rows, so keys and values are not repeated."""
    B, heads, rows, width = query.shape
    if rows == 1:
        out = F.scaled_dot_product_attention(query.view(B, key.shape[1], -1, width), key, value, scale=scaling)
        return out.reshape(B, 1, heads, width), None
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


@torch.no_grad()
def continuations(target: PreTrainedModel, batches: Batches, rows: int, prompt: int, new: int) -> Tensor:
    """[rows, prompt + new]: text continued by the target, greedily in two rows of three, sampled in the others."""
    tokens = batches.text(rows, prompt)
    heat = torch.tensor([0.0, 0.0, 0.8], device=tokens.device).repeat(-(-rows // 3))[:rows, None]
    cache = DynamicCache(config=target.config)
    fed = tokens
    made = [tokens]
    for _ in range(new):
        logits = target(input_ids=fed, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        logits[:, :2] = -math.inf  # never end-of-text or padding
        noise = -torch.log(-torch.log(batches.uniform(*logits.shape).clamp(1e-9, 1 - 1e-7)))
        fed = (logits + heat * noise).argmax(-1, keepdim=True)
        made.append(fed)
    return torch.cat(made, 1)


def draft_steps(
    pool: Tensor, batches: Batches, shapes: tuple[Shape, ...], pool_share: float, rng: random.Random
) -> Iterator[Tensor]:
    """Token batches for the draft: the target's continuations and text with facts, in the stated shares."""
    while True:
        if rng.random() < pool_share:
            yield pool[batches.integers(0, len(pool), shapes[0].rows)].long()
        else:
            shape = rng.choices(shapes, [s.share for s in shapes])[0]
            yield batches.batch(shape, text_only=0.5, repeats=0.05)[0][:, :-1]


def train_draft(args: argparse.Namespace, device: torch.device, tokenizer: PreTrainedTokenizerBase) -> None:
    batches = Batches(args.work, tokenizer, device, args.seed + 1)
    target = place(AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16), device).eval()
    began = time.monotonic()
    AttentionInterface.register("attend_grouped", attend_grouped)
    target.set_attn_implementation("attend_grouped")
    rounds, size = (1, (8, 16, 16)) if args.smoke else (args.pool_rounds, (POOL_ROWS, POOL_PROMPT, POOL_NEW))
    pool = torch.cat([continuations(target, batches, *size).short() for _ in range(rounds)])
    target.set_attn_implementation("sdpa")
    print(f"{len(pool) * size[2] / 1e6:.1f}M tokens continued in {time.monotonic() - began:.0f}s", flush=True)

    shapes, pool_share = (LONG_DRAFT_SHAPES, LONG_POOL_SHARE) if args.start else (DRAFT_SHAPES, POOL_SHARE)
    if args.smoke:
        shapes = SMOKE_STAGES
    if args.start:
        model = place(AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32), device).train()
    else:
        model = place(Qwen3ForCausalLM(draft_config(args.smoke)), device)
    compile_layers(model, device)
    compile_layers(target, device)
    loss_of = torch.compile(distillation_loss, dynamic=False) if device.type == "cuda" else distillation_loss
    opt = optimizer(model, device)
    print(f"draft: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    step = seen = 0
    start = time.monotonic()
    budget = max(1.0, args.seconds - (start - began))
    for tokens in draft_steps(pool, batches, shapes, pool_share, random.Random(args.seed)):
        progress = (time.monotonic() - start) / budget
        if progress >= 1:
            break
        set_rate(opt, args.rate or 4e-3, step, progress)
        with torch.no_grad():
            teacher = target(input_ids=tokens, use_cache=False).logits
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = loss_of(logits, teacher)
        update(model, opt, loss)
        step += 1
        seen += tokens.numel()
        if step % 200 == 0 or args.smoke:
            spent = time.monotonic() - start
            print(f"{spent:.0f}s step {step} loss {loss.item():.3f} {seen / spent:.0f} tok/s", flush=True)
    save(model, args.work / "tokenizer", args.out)
    print(f"draft: {step} steps, {seen / 1e6:.0f}M tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("target", "draft"))
    parser.add_argument("--work", type=Path, required=True, help="folder filled by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder the model is written to")
    parser.add_argument("--target", type=Path, help="the trained target, for the draft")
    parser.add_argument("--start", type=Path, help="go on with this draft, now mostly on long contexts")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--rate", type=float, help="peak learning rate; 2e-3 for the target, 4e-3 for the draft")
    parser.add_argument("--pool-rounds", type=int, default=8, help="rounds of 4096 continuations the draft learns from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny models and batches: does everything run?")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    tokenizer = AutoTokenizer.from_pretrained(args.work / "tokenizer")
    (train_target if args.model == "target" else train_draft)(args, torch.device(args.device), tokenizer)
    print(json.dumps({"written": str(args.out), "bytes": sum(f.stat().st_size for f in args.out.iterdir())}))


if __name__ == "__main__":
    main()
