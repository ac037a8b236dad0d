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
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import VOCAB_SIZE, Batches, Shape
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

from specstream.models.tiny import measure

MAX_POSITIONS = 32768

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
