"""A round in which nothing streams, against its pieces with torch's attention in one CUDA graph.

    python benchmarks/resident_baseline.py [--target qwen3-8b] [--context 1024] [--json FILE]

One request, everything on the device, one query a round. Printed are the engine's rounds in steady state, the device's
time of the graph they replay, the same compiled pieces with `scaled_dot_product_attention` over as many keys as one
graph (its replay and the wait for it), and what reading all weights but the embedding table takes at the rate at
which the device copies. `over_graph` and `over_weights` are the round's time over the latter two.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from contextlib import closing
from typing import Any

import torch

from specstream import api
from specstream.batch import padded_rows
from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import milliseconds, report
from specstream.bench_resident import ResidentModel, in_one_graph, median_ms
from specstream.bench_setup import bench_model, memory_options
from specstream.bench_steady import SteadyRounds
from specstream.cli_bench import add_device
from specstream.engine import Engine
from specstream.graph import PartitionedModel
from specstream.rates import device_copy_bandwidth

WARMUP, ROUNDS = 5, 30


def engine_rounds(engine: Engine, context: int) -> float:
    """The median milliseconds of a round with one query."""
    steady = SteadyRounds(engine, 1, context - 3, queries=1, commit_every=0)
    return statistics.median([steady.run().ms for _ in range(WARMUP + ROUNDS)][WARMUP:])


def graph_ms(engine: Engine) -> float | None:
    """Median milliseconds of replaying the graph of the engine's rounds alone; None if there is none."""
    graphs: list[Any] = list(getattr(engine._executor, "_graphs", {}).values())
    device = engine._executor.store.device
    return median_ms(graphs[-1].graph.replay, device) if graphs else None


@torch.inference_mode()
def baseline_ms(model: PartitionedModel, context: int) -> float:
    """The same pieces, for as many rows as the engine pads a query to, in one graph."""
    device = model.spec.device
    resident = ResidentModel(model, context)
    count = padded_rows(1)
    ids = torch.randint(model.spec.vocab_size, (1, count), device=device)
    rows = torch.arange(count, device=device)

    def run() -> None:
        resident.run(ids, context - count, rows)

    run()  # loads kernels, which a capture may not
    return median_ms(in_one_graph(run, device), device)


def measure(target_name: str, context: int, device: torch.device) -> dict[str, Any]:
    bandwidth = device_copy_bandwidth(device)
    target = bench_model(target_name, context, torch.bfloat16, device)
    options = {"num_speculative_tokens": 1, "max_model_len": context, "max_num_seqs": 1}
    with closing(api.compile(target.module, None, **memory_options(target, options, resident=1.0))) as engine:
        round_ms, replay_ms = engine_rounds(engine, context), graph_ms(engine)
        model = engine._planner.model
    del engine
    gc.collect()
    graph, weights = baseline_ms(model, context), target.read_bytes / bandwidth * 1e3
    return {
        "benchmark": "resident baseline",
        "machine": machine(device),
        "versions": versions(),
        "target": target.figures(),
        "context": context,
        "round_ms": round_ms,
        "round_graph_ms": replay_ms,
        "baseline_graph_ms": graph,
        "weights_ms": weights,
        "over_graph": round_ms / graph,
        "over_weights": round_ms / weights,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-8b", metavar="PRESET|DIR")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens (1024)")
    add_device(parser)
    return parser


def main() -> None:
    given = parser().parse_args()
    figures = measure(given.target, given.context, choose_device(given.device))
    shown = {
        "a round": milliseconds(figures["round_ms"]),
        "its graph": milliseconds(figures["round_graph_ms"]),
        "pieces and torch's attention, one graph": milliseconds(figures["baseline_graph_ms"]),
        "reading the weights": milliseconds(figures["weights_ms"]),
        "round over graph": f"{figures['over_graph']:.3f}",
        "round over reading": f"{figures['over_weights']:.3f}",
        "machine": figures["machine"]["device"],
    }
    report(f"{given.target}, 1 x {given.context} tokens resident, one query", shown, figures, given.json)


if __name__ == "__main__":
    main()
