"""bfloat16: where texts part from the target's own, one token at a time, and whether each place is a near-tie.

    python benchmarks/bfloat16_divergence.py [--target DIR --draft DIR] [--depth 1 4 16] [--json FILE]

Run in blocks, a target's logits differ from those of one token at a time by rounding. Two tokens whose logits are
closer than twice the largest such difference are a near-tie. Greedy texts are compared with the target's own, from
transformers' `generate`; after a token that differs they go on from the target's. Also measured is by how much the
logits of streamed rounds differ from those of resident ones. Without --target: the bundled pair.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from specstream.api import build_engine
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import report
from specstream.bench_text import Alone, alone
from specstream.cli import positive
from specstream.cli_bench import add_device
from specstream.compiler import compile_model, lower_model
from specstream.engine import Engine
from specstream.graph import PartitionedModel
from specstream.models import tiny
from specstream.models.load import load_model
from specstream.options import Options

PROMPTS = (
    "It was a truth",
    "[amber fox: 4815] The road went on. [amber fox:",
    "def main(arguments):\n    ",
    "She had been to the house of her aunt, who",
)
CHUNK_TOKENS = 8
MOST_ROWS = 4096
"""Of a call of a compiled piece: a drafter that catches up with eight requests."""


@torch.no_grad()
def block_difference(target: nn.Module, text: Alone, rows: int) -> float:
    """The largest difference between the logits of one token at a time and those of blocks of `rows`."""
    whole = torch.tensor([text.prompt + text.tokens], device=text.logits.device)
    start = len(text.prompt) - 1
    out: Any = target(whole[:, :start], use_cache=True) if start else None
    cache, parts = out and out.past_key_values, []
    for first in range(start, whole.shape[1] - 1, rows):
        out = target(whole[:, first : min(first + rows, whole.shape[1] - 1)], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits[0].float())
    return float((torch.cat(parts) - text.logits).abs().max())


def decode(engine: Engine, prompt: list[int], new_tokens: int) -> tuple[list[int], Tensor]:
    """The engine's greedy text, and the model's logits float32 [tokens, vocab]."""
    out: Any = engine.generate(
        [prompt],
        max_new_tokens=new_tokens,
        eos_token_id=[],
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.requests[0].token_ids, out.requests[0].logits


def first_difference(ours: list[int], theirs: list[int]) -> int:
    """Index of the first token that differs; how many there are if none does."""
    pairs = zip(ours, theirs, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(ours))


def partings(engine: Engine, text: Alone) -> list[float]:
    """The gap of each token that the engine chooses otherwise, the target's own tokens before it."""
    gaps, at = [], 0
    while at < len(text.tokens):
        ours, _ = decode(engine, text.prompt + text.tokens[:at], len(text.tokens) - at)
        at += first_difference(ours, text.tokens[at:])
        if at < len(text.tokens):
            gaps.append(text.gap(at))
        at += 1
    return gaps


def streamed_difference(streamed: Engine, resident: Engine, text: Alone) -> float:
    """The largest difference between the logits of the two engines, as far as their texts agree."""
    ours, theirs = (decode(engine, text.prompt, len(text.tokens)) for engine in (streamed, resident))
    same = min(first_difference(ours[0], theirs[0]) + 1, len(ours[0]))
    return float((ours[1][:same] - theirs[1][:same]).abs().max())


@dataclass
class Pair:
    """A target and a draft in bfloat16, captured once for engines of every depth."""

    target: nn.Module
    models: tuple[PartitionedModel, PartitionedModel]
    tokenizer: Any

    @classmethod
    def load(cls, target: Path, draft: Path, device: torch.device) -> Pair:
        module, tokenizer, _ = load_model(target, torch.bfloat16, device)
        draft_module, _, _ = load_model(draft, torch.bfloat16, device)
        return cls(module, (_captured(module, "target"), _captured(draft_module, "draft")), tokenizer)

    def engine(self, depth: int, max_model_len: int, *, resident: bool) -> Engine:
        options = Options(
            num_speculative_tokens=depth,
            max_model_len=max_model_len,
            chunk_tokens=CHUNK_TOKENS,
            gpu_kv_budget="auto" if resident else "min",
        )
        return build_engine(options, *self.models, self.tokenizer)

    def texts(self, new_tokens: int) -> list[Alone]:
        return [alone(self.target, self.tokenizer(prompt).input_ids, new_tokens) for prompt in PROMPTS]


def _captured(module: nn.Module, role: str) -> PartitionedModel:
    model = compile_model(module, role, None, role)
    return model if model.spec.device.type == "cpu" else lower_model(module, model, None, role, MOST_ROWS)


def measure(pair: Pair, depth: int, texts: list[Alone]) -> dict[str, Any]:
    """The figures of one number of candidates."""
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    noise = max(block_difference(pair.target, text, depth + 1) for text in texts)
    with (
        pair.engine(depth, longest, resident=False) as streamed,
        pair.engine(depth, longest, resident=True) as resident,
    ):
        gaps = [gap for text in texts for gap in partings(streamed, text)]
        apart = max(streamed_difference(streamed, resident, text) for text in texts)
        assert streamed.metrics().streamed_bytes > resident.metrics().streamed_bytes == 0
    return {
        "block_difference": noise,
        "streamed_difference": apart,
        "tokens": sum(len(text.tokens) for text in texts),
        "partings": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "beyond_near_ties": sum(gap >= 2 * noise for gap in gaps),
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bundled = Path(tiny.__file__).parent
    parser.add_argument("--target", type=Path, default=bundled / "target", metavar="DIR")
    parser.add_argument("--draft", type=Path, default=bundled / "draft", metavar="DIR")
    parser.add_argument("--depth", type=positive, nargs="+", default=[1, 4, 16], help="candidates a round (1 4 16)")
    parser.add_argument("--new-tokens", type=positive, default=96, metavar="N", help="of each text (96)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    device = choose_device(given.device)
    logging.disable_progress_bar()
    pair = Pair.load(given.target, given.draft, device)
    texts = pair.texts(given.new_tokens)
    depths = {depth: measure(pair, depth, texts) for depth in given.depth}
    figures = {
        "benchmark": "bfloat16 divergence",
        "machine": machine(device),
        "versions": versions(),
        "target": str(given.target.name),
        "depths": depths,
        "streamed_difference": max(one["streamed_difference"] for one in depths.values()),
        "beyond_near_ties": sum(one["beyond_near_ties"] for one in depths.values()),
    }
    shown = {
        f"{depth} candidates": "{partings} of {tokens} tokens differ, {beyond_near_ties} at no near-tie; gaps up to "
        "{largest_gap:.3f}, blocks differ by {block_difference:.3f}, streaming by {streamed_difference:.3f}".format(
            **one
        )
        for depth, one in depths.items()
    }
    report("bfloat16, greedy, everything streamed", shown, figures, given.json)


if __name__ == "__main__":
    main()
