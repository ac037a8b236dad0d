"""How often a target that drafts for itself with a window proposes its own tokens, and whether they stay its own.

    python benchmarks/self_draft.py --target DIR [--text FILE] [--context 4096 8192] [--json FILE]

Parts of a real text are continued greedily in float32, one at a time and with everything streamed, and compared with
the target's own continuation, from transformers' `generate`; after a token that differs they go on from the target's.
A token whose logit exceeds the second best by less than 1e-4 is a near-tie. `acceptance` is the chance that a candidate
is right if those before it are: accepted / (accepted + rejected), of each round at most the first wrong one counted.

Greedy text of a small model repeats itself, which is easy to draft. So `agreement_on_text` is measured on the text
itself: at how many positions of its later half the best token with a window is the best one with all of the text.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from specstream import api
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import report
from specstream.bench_text import NOVEL, alone, text_prompts
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.draft import DraftWindow
from specstream.engine import Engine
from specstream.models.load import load_model
from specstream.models.tiny import TARGET
from specstream.options import SELF, SELF_WINDOW, Options

NEAR_TIE = 1e-4
"""Of float32: gaps between two best logits that two correct computations may see otherwise."""


@dataclass
class Counts:
    """Of one or more texts."""

    tokens: int = 0
    """Of the target's own continuations."""
    rounds: int = 0
    """Verifications, those without candidates included."""
    accepted: int = 0
    rejected: int = 0
    """Rounds with a wrong candidate."""
    gaps: list[float] = field(default_factory=list)
    """Of each token that differs, between the target's two best logits."""
    positions: int = 0
    """Of the real text at which the best tokens with and without a window are compared."""
    agreeing: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {
            "acceptance": self.accepted / max(1, self.accepted + self.rejected),
            "mean_acceptance_length": 1 + self.accepted / self.rounds,
            "differences": len(self.gaps),
            "largest_gap": max(self.gaps, default=0.0),
            "beyond_near_ties": sum(gap >= NEAR_TIE for gap in self.gaps),
            "agreement_on_text": self.agreeing / self.positions,
        }


def decode(engine: Engine, prompt: list[int], new_tokens: int, counts: Counts) -> list[int]:
    """The engine's greedy tokens; its rounds go to `counts`."""
    tokens: list[int] = []
    engine.submit(prompt, max_new_tokens=new_tokens)
    while engine.has_unfinished:
        before = engine.metrics()
        for output in engine.step():
            tokens += output.new_token_ids
        after = engine.metrics()
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        counts.rounds += after.num_verify_rounds - before.num_verify_rounds
        counts.accepted += accepted
        counts.rejected += accepted < after.num_draft_tokens - before.num_draft_tokens
    return tokens


def compare(engine: Engine, target: nn.Module, prompt: list[int], new_tokens: int) -> Counts:
    """What the engine makes of a prompt, beside what the target does alone."""
    text = alone(target, prompt, new_tokens)
    own = text.tokens
    counts, at = Counts(tokens=new_tokens), 0
    while at < new_tokens:
        ours = decode(engine, prompt + own[:at], new_tokens - at, counts)
        while at < new_tokens and ours.pop(0) == own[at]:
            at += 1
        if at < new_tokens:
            counts.gaps.append(text.gap(at))
            at += 1
    return counts


@torch.no_grad()
def agreement_on_text(target: nn.Module, text: list[int], window: int) -> Counts:
    """Compares the best tokens with a window and with all of a text, the text's own tokens before each."""
    device = next(target.parameters()).device
    ids, places = torch.tensor([text], device=device), torch.arange(len(text), device=device)
    seen = DraftWindow(len(text), window, Options.draft_sink).visible(places, places)
    later = places[len(text) // 2 :]
    whole, windowed = (
        target(ids, attention_mask=mask, use_cache=False, logits_to_keep=later).logits[0].argmax(-1)
        for mask in (torch.ones_like(ids), seen[None, None])
    )
    return Counts(positions=len(later), agreeing=int((whole == windowed).sum()))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device)
    logging.disable_progress_bar()
    target, tokenizer, name = load_model(given.target, torch.float32, device)
    options: dict[str, Any] = {
        "max_model_len": max(given.context),
        "max_num_seqs": 1,
        "num_speculative_tokens": given.depth,
        "draft_window": given.draft_window,
        "gpu_kv_budget": "min",
    }
    contexts: dict[int, Counts] = {}
    with api.compile(target, SELF, **options) as engine:
        for context in given.context:
            contexts[context] = Counts()
            for text in text_prompts(tokenizer, given.text, given.prompts, context):
                contexts[context] += compare(engine, target, text[: -given.new_tokens], given.new_tokens)
                contexts[context] += agreement_on_text(target, text, given.draft_window)
        assert engine.metrics().streamed_bytes > 0
    return {
        "benchmark": "self-drafting",
        "machine": machine(device),
        "versions": versions(),
        "target": name,
        "text": given.text.name,
        "prompts": given.prompts,
        "new_tokens": given.new_tokens,
        "depth": given.depth,
        "draft_window": given.draft_window,
        "contexts": {context: counts.figures() for context, counts in contexts.items()},
        **sum(contexts.values(), Counts()).figures(),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, metavar="DIR", help="(the bundled one)")
    parser.add_argument("--text", type=Path, default=NOVEL, metavar="FILE", help=f"({NOVEL.name}, bundled)")
    parser.add_argument("--context", type=positive, nargs="+", default=[4096, 8192], metavar="N", help="(4096 8192)")
    parser.add_argument("--prompts", type=positive, default=4, metavar="N", help="of each context (4)")
    parser.add_argument("--new-tokens", type=positive, default=128, metavar="N", help="of each context's tokens (128)")
    parser.add_argument("--depth", type=positive, default=4, metavar="K", help="candidates a round (4)")
    parser.add_argument("--draft-window", type=positive, default=SELF_WINDOW, metavar="N", help=f"({SELF_WINDOW})")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        f"{context} tokens": "acceptance {acceptance:.3f}, {mean_acceptance_length:.2f} tokens a round, on the text "
        "{agreement_on_text:.3f}; {differences} of {tokens} tokens differ, {beyond_near_ties} at no near-tie".format(
            **one
        )
        for context, one in [*figures["contexts"].items(), ("all", figures)]
    }
    report(f"{figures['target']}, drafting for itself, float32, everything streamed", shown, figures, given.json)


if __name__ == "__main__":
    main()
