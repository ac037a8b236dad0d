"""Measure the bundled pair: recall of facts at every advertised length, and the draft's agreement with the target.

``python -m specstream.models.tiny.measure --json``

Recall: held-out facts are put between the paragraphs of held-out text and asked one after another at its end, each
after the earlier questions and their answers. A fact counts when every token of its value is the target's greedy
choice, given the true text before it: that is when greedy decoding answers it. Agreement: the target continues
held-out text greedily; the figure is the share of those tokens that are also the draft's greedy choice after the
same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from specstream.models.tiny import ADVERTISED_LENGTHS, DRAFT, TARGET, TEXT
from specstream.models.tiny.facts import make_answer, make_fact, make_question, random_facts

TEXTS = {"novel": "persuasion.txt", "docs": "docs.txt", "python": "python.txt"}
FACTS_PER_PROMPT = 8


def read_text(domain: str) -> str:
    """One of the held-out texts."""
    return (TEXT / TEXTS[domain]).read_text(encoding="utf8")


def load(folder: Path, device: str, dtype: str) -> PreTrainedModel:
    """One of the two models, ready to be measured."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    assert isinstance(model, PreTrainedModel)
    torch.nn.Module.to(model, device)
    return model


def whole_text(tokenizer: PreTrainedTokenizerBase, domain: str, device: torch.device) -> torch.Tensor:
    """One of the held-out texts as tokens."""
    return torch.tensor(tokenizer.encode(read_text(domain), add_special_tokens=False, verbose=False), device=device)


def windows(ids: torch.Tensor, size: int, rows: int = 8, limit: int = 32) -> Iterator[torch.Tensor]:
    """The first windows of `size` tokens, at most `limit` of them, in batches of `rows`."""
    every = ids[: len(ids) // size * size].view(-1, size)[:limit]
    for i in range(0, len(every), rows):
        yield every[i : i + rows]


def recall_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int, facts: list[tuple[str, str]], rng: random.Random
) -> tuple[list[int], list[list[int]]]:
    """A prompt of `length` tokens, facts spread over text and then asked: (tokens, positions of each value)."""

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer.encode(part, add_special_tokens=False)
        return ids

    asked = rng.sample(facts, len(facts))
    tail: list[int] = []
    values: list[list[int]] = []
    for i, (key, value) in enumerate(asked):
        tail += encode(("\n\n" if i == 0 else "\n") + make_question(key))
        answer = encode(make_answer(value))
        values.append([len(tail) + j for j in range(len(answer) - 1)])
        tail += answer
    stated = [encode("\n\n" + make_fact(key, value) + "\n\n") for key, value in facts]
    room = length - len(tail) - sum(len(s) for s in stated)

    gap = encode("\n\n")
    history: list[int] = []
    ends: list[int] = []
    start = text.find("\n", rng.randrange(max(1, len(text) - 4 * room))) + 1
    paragraphs = itertools.cycle(text[start:].split("\n\n") + text[:start].split("\n\n"))
    while len(history) < room:
        history += encode(next(paragraphs))
        ends.append(len(history))
        history += gap
    history = history[:room]
    ends = sorted(e for e in ends if e <= room)
    places = sorted((rng.choice(ends) if ends else rng.randrange(room) for _ in facts), reverse=True)
    for at, statement in zip(places, stated, strict=True):
        history[at:at] = statement
    return history + tail, [[len(history) + at for at in value] for value in values]


@torch.no_grad()
def recall(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, n: int, seed: int = 0
) -> dict[str, float | int]:
    """Share of at least `n` held-out facts that the target recalls in prompts of `length` tokens."""
    rng = random.Random(seed)
    texts = [read_text(domain) for domain in TEXTS]
    right = total = 0
    for i in range(-(-n // FACTS_PER_PROMPT)):
        facts = random_facts(FACTS_PER_PROMPT, seed=seed * 100_003 + i)
        tokens, values = recall_prompt(tokenizer, texts[i % len(texts)], length, facts, rng)
        ids = torch.tensor([tokens], device=target.device)
        at = torch.tensor(values, device=target.device)  # [facts, tokens of a value]
        choice = target(input_ids=ids, use_cache=False, logits_to_keep=at.flatten() - 1).logits[0].argmax(-1)
        right += int((choice.view_as(at) == ids[0, at]).all(-1).sum())
        total += len(values)
    return {"length": length, "recall": right / total, "right": right, "n": total}


@torch.no_grad()
def agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: int,
    prompt_tokens: int = 256,
    new_tokens: int = 128,
) -> dict[str, dict[str, float | int]]:
    """Per domain and over all: share of the target's own greedy tokens that are the draft's greedy choice too."""
    report: dict[str, dict[str, float | int]] = {}
    for domain in TEXTS:
        ids = whole_text(tokenizer, domain, target.device)
        starts = torch.linspace(0, len(ids) - prompt_tokens - 1, prompts).long().tolist()
        batch = torch.stack([ids[s : s + prompt_tokens] for s in starts])
        assert isinstance(target, GenerationMixin)
        out = target.generate(
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        assert isinstance(out, torch.Tensor)
        guess = draft(input_ids=out, use_cache=False).logits[:, prompt_tokens - 1 : -1].argmax(-1)
        same = guess == out[:, prompt_tokens:]
        report[domain] = {
            "agreement": float(same.float().mean()),
            "n": same.numel(),
            "agreement_first_32": float(same[:, :32].float().mean()),
        }
    rows = list(report.values())  # of equal size
    report["all"] = {
        "agreement": sum(r["agreement"] for r in rows) / len(rows),
        "n": sum(int(r["n"]) for r in rows),
        "agreement_first_32": sum(r["agreement_first_32"] for r in rows) / len(rows),
    }
    return report


@torch.no_grad()
def agreement_on_text(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> dict[str, float | int]:
    """Share of the last quarter of `length` tokens of held-out text where both models choose the same token."""
    same = []
    for domain in TEXTS:
        ids = whole_text(tokenizer, domain, target.device)[None, :length]
        last = length // 4
        choices = [m(input_ids=ids, use_cache=False, logits_to_keep=last).logits.argmax(-1) for m in (target, draft)]
        same.append(choices[0] == choices[1])
    every = torch.cat(same)
    return {"length": length, "agreement": float(every.float().mean()), "n": every.numel()}


@torch.no_grad()
def text_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, window: int = 1024) -> dict[str, float]:
    """Mean loss in nats per token on the held-out texts, in windows of `window` tokens."""
    report: dict[str, float] = {}
    for domain in TEXTS:
        ids = whole_text(tokenizer, domain, model.device)
        losses = []
        for row in windows(ids, window):
            logits = model(input_ids=row, use_cache=False).logits[:, :-1].float()
            losses.append(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="none")
            )
        report[domain] = float(torch.cat(losses).mean())
    return report


@torch.no_grad()
def overlap(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, window: int = 1024
) -> dict[str, float]:
    """Mean of sum(min(p, q)) on the held-out texts: the acceptance to expect when sampling at temperature 1."""
    report: dict[str, float] = {}
    for domain in TEXTS:
        ids = whole_text(tokenizer, domain, target.device)
        shared = []
        for row in windows(ids, window):
            p = target(input_ids=row, use_cache=False).logits.float().softmax(-1)
            q = draft(input_ids=row, use_cache=False).logits.float().softmax(-1)
            shared.append(torch.minimum(p, q).sum(-1))
        report[domain] = float(torch.cat(shared).mean())
    return report


def measure(
    target_dir: Path, draft_dir: Path | None, device: str, dtype: str, n: int, prompts: int, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """All figures of the pair in these folders."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    target = load(target_dir, device, dtype)
    report: dict[str, Any] = {"device": device, "dtype": dtype, "torch": torch.__version__}
    report["text_loss"] = {"target": text_loss(target, tokenizer)}
    if draft_dir is not None:
        draft = load(draft_dir, device, dtype)
        report["text_loss"]["draft"] = text_loss(draft, tokenizer)
        report["agreement"] = agreement(target, draft, tokenizer, prompts)
        report["agreement_on_text"] = [agreement_on_text(target, draft, tokenizer, length) for length in lengths]
        report["overlap"] = overlap(target, draft, tokenizer)
        report["draft_recall"] = [recall(draft, tokenizer, length, n) for length in lengths]
    report["recall"] = [recall(target, tokenizer, length, n) for length in lengths]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the bundled tiny pair on held-out text and facts.")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--no-draft", action="store_true", help="measure the target alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--n", type=int, default=200, help="facts per length")
    parser.add_argument("--prompts", type=int, default=48, help="prompts per domain for the agreement")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(ADVERTISED_LENGTHS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    report = measure(
        args.target,
        None if args.no_draft else args.draft,
        args.device,
        args.dtype,
        args.n,
        args.prompts,
        tuple(args.lengths),
    )
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for row in report["recall"]:
        print(f"recall at {row['length']:6d} tokens: {row['right']}/{row['n']} = {row['recall']:.3f}")
    for row in report.get("draft_recall", []):
        print(f"the draft's own recall at {row['length']:6d} tokens: {row['right']}/{row['n']} = {row['recall']:.3f}")
    for domain, row in report.get("agreement", {}).items():
        print(
            f"draft agrees with the target's own greedy text, {domain}: {row['agreement']:.3f} of {row['n']}"
            f" (first 32 tokens of each: {row['agreement_first_32']:.3f})"
        )
    for row in report.get("agreement_on_text", []):
        print(f"same choice on held-out text, {row['length']:6d} tokens in: {row['agreement']:.3f} of {row['n']}")
    if "overlap" in report:
        print("expected acceptance when sampling: " + ", ".join(f"{d} {v:.3f}" for d, v in report["overlap"].items()))
    for model, losses in report["text_loss"].items():
        print(f"{model} loss on held-out text: " + ", ".join(f"{d} {v:.3f}" for d, v in losses.items()))


if __name__ == "__main__":
    main()
