"""Where the draft's best token is not the target's: which of its next best ones is, on real text.

    python benchmarks/recovery_ranks.py [--target DIR] [--draft DIR|self] [--context 1024] [--window 1024] [--prompts 8]

Lookahead drafts for the likeliest of the target's own tokens; these are the shares that it reckons with
(`specstream.lookahead`). Both models read a novel, float32; over the later half of each part, the share of the
positions at which the target's best token is the draft's best, and among the others its second, third, ... best.
Without --target: the bundled pair. A draft of "self" is the target with a window of its latest tokens and the first 4.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import report
from specstream.bench_text import NOVEL, text_prompts
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.draft import DraftWindow
from specstream.models import tiny
from specstream.models.load import load_model
from specstream.options import SELF, Options

RANKS = 8
BUNDLED = Path(tiny.__file__).parent


@torch.no_grad()
def best_tokens(model: Any, ids: Tensor, window: int | None) -> Tensor:
    """The best tokens after each of the later half of ids [1, N], the best first: int64 [N / 2, RANKS]."""
    places = torch.arange(ids.shape[1], device=ids.device)
    later, mask = places[ids.shape[1] // 2 :], torch.ones_like(ids)
    if window is not None:
        mask = DraftWindow(ids.shape[1], window, Options.draft_sink).visible(places, places)[None, None]
    logits: Tensor = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=later).logits[0]
    return logits.topk(RANKS).indices


def shares(target: nn.Module, draft: nn.Module, window: int | None, texts: list[list[int]]) -> list[float]:
    """The share of positions at which the draft's best token is right; of the others, those of its next best."""
    device, rights = next(target.parameters()).device, []
    for text in texts:
        ids = torch.tensor([text], device=device)
        rights.append(best_tokens(draft, ids, window) == best_tokens(target, ids, None)[:, :1])
    right = torch.cat(rights).double()
    wrong = right[right[:, 0] == 0]
    return [float(right[:, 0].mean()), *wrong[:, 1:].mean(0).tolist()]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"), metavar="DIR")
    parser.add_argument("--draft", default=str(BUNDLED / "draft"), metavar="DIR|self")
    parser.add_argument("--context", type=positive, default=1024, metavar="N", help="tokens of each part (1024)")
    parser.add_argument("--window", type=positive, default=1024, metavar="N", help="of a draft that is self (1024)")
    parser.add_argument("--prompts", type=positive, default=8, metavar="N", help="parts (8)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    logging.disable_progress_bar()
    device, itself = choose_device(given.device), given.draft == SELF
    target, tokenizer, _ = load_model(Path(given.target), torch.float32, device)
    draft = target if itself else load_model(Path(given.draft), torch.float32, device)[0]
    texts = text_prompts(tokenizer, NOVEL, given.prompts, given.context)
    agreement, *ranks = shares(target, draft, given.window if itself else None, texts)
    figures = {
        "benchmark": "recovery ranks",
        "machine": machine(device),
        "versions": versions(),
        "positions": sum(len(text) - len(text) // 2 for text in texts),
        "agreement": agreement,
        "rank_shares": ranks,
    }
    shown = {
        "the draft's best token is the target's": f"{agreement:.1%} of {figures['positions']} positions",
        "where not, its second, third, ... best is": ", ".join(f"{share:.3f}" for share in ranks),
    }
    report(f"{Path(given.target).name} and {Path(given.draft).name}, a novel", shown, figures, given.json)


if __name__ == "__main__":
    main()
