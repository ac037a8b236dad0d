"""What plans themselves cost on the CPU: milliseconds to make one, microseconds a step with no-ops for all its work.

    python benchmarks/interpreter_overhead.py [--json]

Prints the median and the least of `--rounds` rounds, for plans of the size of an 8B model's. Making a plan is timed
without its proof, which is timed apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
from torch import Tensor, fx, nn

from specstream.attention import LayerAttention
from specstream.batch import FlatRows, RoundBatch, SeatRows
from specstream.executor import CpuExecutor
from specstream.graph import AttentionSite, AttentionSpec, ModelSpec, PartitionedModel, Piece
from specstream.kv import ChunkLayout, DeviceStore, HostStore, SequenceKV
from specstream.planner import Planner
from specstream.profiles import CPU_PROFILE
from specstream.round_spec import RoundSpec, SeatSpec


class IdleAttention(LayerAttention):
    """Attends to nothing."""

    def append(self, *arguments: object) -> None: ...

    def local(self, *arguments: object) -> None: ...

    def attend(self, *arguments: object) -> None: ...

    def merge(self, *arguments: object) -> Tensor:
        return EMPTY


EMPTY = torch.empty(0, 0)


def idle_model(layers: int) -> PartitionedModel:
    """Pieces that take and give empty tensors."""

    def piece(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Piece:
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in inputs]
        graph.output((given[0],) * len(outputs))
        return Piece(fx.GraphModule(nn.Module(), graph), inputs, outputs, ())

    attentions = tuple(AttentionSpec(i, "", 1, 1, 1, 1.0) for i in range(layers))
    pieces = [piece(("input_ids",), ("q0", "k0", "v0"))]
    pieces += [piece((f"o{i - 1}",), (f"q{i}", f"k{i}", f"v{i}")) for i in range(1, layers)]
    pieces.append(piece((f"o{layers - 1}",), ("logits",)))
    sites = tuple(AttentionSite(a, f"q{a.layer}", f"k{a.layer}", f"v{a.layer}", f"o{a.layer}") for a in attentions)
    spec = ModelSpec("idle", 1, torch.float32, torch.device("cpu"), None, attentions)
    return PartitionedModel(tuple(pieces), sites, ("input_ids",), "logits", spec)


def measure(layers: int, groups: int, slots: int, rounds: int) -> dict[str, float]:
    """Times plans and rounds of `layers` layers with `groups` streamed groups each; microseconds are a plan step's."""
    model = idle_model(layers)
    layout = ChunkLayout.of(model.spec, chunk_tokens=1)
    store = DeviceStore(layout, 3, slots, 1, model.spec.device)
    run = HostStore(layout, 1 << 30, groups + 3).reserve(groups + 3)
    kv = SequenceKV(layout, groups + 3, 0, 3, store.take(3), run, length=groups, streamed=groups)
    seat = SeatSpec(0, 0, 3, groups, 0, groups, 1)
    spec = RoundSpec(layers, slots, 1, layout.block_bytes, (seat,), 0, 4)
    planner = Planner(model, CPU_PROFILE)
    idle = IdleAttention(store)
    executor = CpuExecutor(model, store, lambda spec, batch: idle, copy=lambda destination, source: None)
    batch = RoundBatch(FlatRows.of([]), {0: SeatRows(kv, 0, 1)}, lambda logits: None, lambda step: None)
    cold = planner.plan(spec)
    before = time.thread_time()  # what others do on the machine does not count
    warm = planner.plan(spec.warm())
    planned = time.thread_time()
    planner.prove(warm)
    proven = time.thread_time()
    executor.run(cold, cold.spec, batch)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        executor.run(warm, warm.spec, batch)
        times.append((time.perf_counter() - start) * 1e6 / len(warm.steps))
    executor.close()
    return {
        "steps": len(warm.steps),
        "plan_ms": (planned - before) * 1e3,
        "proof_ms": (proven - planned) * 1e3,
        "median_us": statistics.median(times),
        "least_us": min(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = {
        f"{layers} layers x {groups} groups, {slots} slots": measure(layers, groups, slots, arguments.rounds)
        for layers, groups, slots in ((6, 16, 4), (36, 16, 4), (36, 1, 2))
    }
    if arguments.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}))
        return
    for name, row in rows.items():
        plan = f"planned in {row['plan_ms']:.1f} ms, proven in {row['proof_ms']:.1f} ms"
        figures = f"{plan}  median {row['median_us']:.1f} us  least {row['least_us']:.1f} us a step"
        print(f"{name:<36} {row['steps']:>6} steps  {figures}")


if __name__ == "__main__":
    main()
