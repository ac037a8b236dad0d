"""What the target's pieces cost without their attention: milliseconds a pass, interpreted and compiled.

    python benchmarks/pieces.py [--rows 2 8 40 264] [--preset NAME] [--fixed] [--setting max_autotune_gemm=1] [--json]

Needs a CUDA device. The pieces are those of a random model of Qwen3-8B's shape in bfloat16; in place of an attention
its queries are copied. A pass over all pieces is one CUDA graph; a figure is the least of several replays. The floor is
the time that reading all weights but the embedding table takes at the rate at which the device copies. `compiled` is
what Inductor makes of the pieces by itself, `grouped` with linear maps of one input as one call, `fused` with SwiGLU
as one, too, as the engine runs them; `--fixed` also measures code for each number of rows apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specstream.capture import capture
from specstream.compiler import model_passes
from specstream.graph import AttentionSite, PartitionedModel
from specstream.models.presets import PRESETS, dummy_model, preset_config
from specstream.ops import token_major
from specstream.passes.compile_pieces import CompilePieces
from specstream.passes.fuse_swiglu import FuseSwiglu
from specstream.passes.group_linears import GroupLinears
from specstream.pipeline import PassRunner
from specstream.probe import run_pieces
from specstream.rates import device_copy_bandwidth

REPLAYS = 20
MAX_MODEL_LEN = 32_768
LOGIT_ROWS = 40
"""At most: a prompt's rows need no logits but the last one's."""


def build(preset: str, layers: int | None) -> nn.Module:
    """A random model of a preset's shape, of so many of its layers, on the device."""
    config: Any = preset_config(preset, MAX_MODEL_LEN)[0]
    if layers is not None:
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return dummy_model(config, torch.bfloat16, "cuda")


def cut(model: nn.Module) -> PartitionedModel:
    captured = capture(model, name="model", max_model_len=MAX_MODEL_LEN)
    partitioned: PartitionedModel = PassRunner("pieces").run(model_passes(MAX_MODEL_LEN), captured)
    return partitioned


def copy_queries(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return token_major(q).copy_(q)


def one_pass(partitioned: PartitionedModel, rows: int) -> Callable[[], Tensor]:
    """A call that runs all pieces on random tokens."""
    ids = torch.randint(partitioned.spec.vocab_size, (1, rows), device="cuda")
    positions = torch.arange(rows, device="cuda")[None]
    logit_rows = torch.arange(min(rows, LOGIT_ROWS), device="cuda")
    return lambda: run_pieces(partitioned, (ids, positions, logit_rows), copy_queries)


def least(replay: Callable[[], object]) -> float:
    """Milliseconds of the device, the least of several."""
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def measure(partitioned: PartitionedModel, rows: int) -> dict[str, float]:
    """Milliseconds a pass: `device` replayed as a CUDA graph, `host` to launch it without one."""
    call = one_pass(partitioned, rows)
    call()
    torch.cuda.synchronize()
    host = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return {"device": least(graph.replay), "host": min(host)}


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


@torch.inference_mode()
def run(
    preset: str, layers: int | None, all_rows: Sequence[int], fixed: bool, settings: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    started = time.perf_counter()
    model = build(preset, layers)
    plain = cut(model)
    captured = time.perf_counter()
    compile_pieces = CompilePieces(settings=settings)
    variants = {
        "interpreted": plain,
        "compiled": PassRunner("pieces").run((compile_pieces,), plain),
        "grouped": PassRunner("pieces").run((GroupLinears(), compile_pieces), plain),
        "fused": PassRunner("pieces").run((FuseSwiglu(), GroupLinears(), compile_pieces), plain),
    }
    embedding = model.get_parameter("model.embed_tokens.weight")  # only the rows of the tokens are read
    read = plain.weight_bytes - embedding.nbytes
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "preset": preset,
        "layers": plain.spec.num_layers,
        "seconds_to_build_and_capture": captured - started,
        "seconds_to_compile": time.perf_counter() - captured,
        "weight_bytes_without_embedding": read,
        "floor_ms": read / device_copy_bandwidth(torch.device("cuda")) * 1e3,
        "rows": {},
    }
    for rows in all_rows:
        figures = {name: measure(pieces, rows) for name, pieces in variants.items()}
        if fixed:
            step = CompilePieces(rows=rows, logit_rows=min(rows, LOGIT_ROWS), settings=settings)
            figures["fixed"] = measure(PassRunner("pieces").run((FuseSwiglu(), GroupLinears(), step), plain), rows)
        result["rows"][rows] = figures
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-8b", help="shape of the model (qwen3-8b)")
    parser.add_argument("--layers", type=int, help="as many of its layers (all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 40, 264])
    parser.add_argument("--fixed", action="store_true", help="also compile for each number of rows apart")
    parser.add_argument("--setting", type=setting, action="append", default=[], help="Inductor's, as NAME=JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    result = run(arguments.preset, arguments.layers, arguments.rows, arguments.fixed, tuple(arguments.setting))
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"{result['device']}, torch {result['torch']}, {result['preset']}, {result['layers']} layers: "
        f"capture {result['seconds_to_build_and_capture']:.0f} s, compile {result['seconds_to_compile']:.0f} s; "
        f"{result['weight_bytes_without_embedding'] / 1e9:.2f} GB of weights, floor {result['floor_ms']:.2f} ms"
    )
    print(f"{'rows':>6} {'pieces':<12} {'device ms':>10} {'of floor':>9} {'host ms':>8}")
    for rows, figures in result["rows"].items():
        for name, value in figures.items():
            over = value["device"] / result["floor_ms"]
            print(f"{rows:>6} {name:<12} {value['device']:>10.3f} {over:>9.2f} {value['host']:>8.2f}")


if __name__ == "__main__":
    main()
