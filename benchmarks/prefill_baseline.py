"""Time to read a prompt with everything offloaded, against the same model with all its KV on the device.

    python benchmarks/prefill_baseline.py [--target qwen3-8b] [--context 32768] [--json FILE]

Both compute one random prompt up to the logits after its last token, after a shorter one that warms them up. The
baseline runs the same pieces, compiled for `--piece` tokens at a time, with torch's flash attention and with logits for
the last token alone. `over_resident` is the quotient of the two times.
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import closing
from typing import Any

import torch

from specstream import api
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import report
from specstream.bench_resident import ResidentModel, wait_for
from specstream.bench_setup import bench_model, memory_figures, memory_options
from specstream.cli import add_option_flags, chosen_options, positive
from specstream.cli_bench import add_device
from specstream.engine import Engine
from specstream.graph import PartitionedModel
from specstream.passes.compile_pieces import CompilePieces
from specstream.pipeline import PassRunner

NEW_TOKENS = 2
MEMORY = ("chunk_tokens", "group_chunks", "staging_slots", "max_num_batched_tokens", "gpu_kv_budget")


def random_ids(vocab_size: int, count: int) -> list[int]:
    ids: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids


def streamed_seconds(engine: Engine, tokens: int) -> float:
    """From the start of a prompt to its first token."""
    engine.submit(random_ids(engine.vocab_size, tokens), max_new_tokens=NEW_TOKENS)
    start = time.perf_counter()
    while not engine.step():
        pass
    seconds = time.perf_counter() - start
    engine.reset()
    return seconds


@torch.inference_mode()
def resident_seconds(resident: ResidentModel, tokens: int, piece: int) -> float:
    """The same without the engine."""
    spec = resident.model.spec
    ids = torch.tensor([random_ids(spec.vocab_size, tokens)], device=spec.device)
    last = torch.full((1,), -1, device=spec.device)
    wait_for(spec.device)
    start = time.perf_counter()
    for first in range(0, tokens, piece):
        part = ids[:, first : first + piece]
        wanted = last + part.shape[1] if first + piece >= tokens else last[:0]
        logits = resident.run(part, first, wanted)
    int(logits.argmax())
    return time.perf_counter() - start


def compiled_for(model: PartitionedModel, rows: int) -> PartitionedModel:
    """The pieces compiled once more, for at most so many rows; on a CPU as they are."""
    if model.spec.device.type == "cpu":
        return model
    compiled: PartitionedModel = PassRunner("baseline").run((CompilePieces(max_rows=rows),), model)
    return compiled


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device, tokens = choose_device(given.device), given.context - NEW_TOKENS
    warmup = min(tokens, 2 * given.piece)
    target = bench_model(given.target, given.context, torch.bfloat16, device)
    options = chosen_options(given) | {"max_model_len": given.context, "max_num_seqs": 1, "num_speculative_tokens": 4}
    with closing(api.compile(target.module, None, **memory_options(target, options, resident=0.0))) as engine:
        streamed_seconds(engine, warmup)
        streamed = streamed_seconds(engine, tokens)
        memory, model = memory_figures(engine), engine._planner.model
    del engine
    gc.collect()
    resident_model = ResidentModel(compiled_for(model, given.piece), tokens)
    resident_seconds(resident_model, warmup, given.piece)
    resident = resident_seconds(resident_model, tokens, given.piece)
    return {
        "benchmark": "prefill baseline",
        "machine": machine(device),
        "versions": versions(),
        "target": target.figures(),
        "context": given.context,
        "piece": given.piece,
        **memory,
        "streamed_seconds": streamed,
        "resident_seconds": resident,
        "over_resident": streamed / resident,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--context", type=positive, default=32_768, metavar="N", help="tokens (32768)")
    parser.add_argument("--piece", type=positive, default=8192, metavar="N", help="tokens of the baseline's (8192)")
    add_device(parser)
    add_option_flags(parser, MEMORY)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given)
    shown = {
        "streamed": f"{figures['streamed_seconds']:.2f} s",
        "resident, torch's attention": f"{figures['resident_seconds']:.2f} s",
        "quotient": f"{figures['over_resident']:.3f}",
        "chunks": f"{figures['chunk_tokens']} tokens, {figures['group_chunks']} a group",
        "machine": figures["machine"]["device"],
    }
    report(f"{given.target}, a prompt of {given.context - NEW_TOKENS} tokens", shown, figures, given.json)


if __name__ == "__main__":
    main()
