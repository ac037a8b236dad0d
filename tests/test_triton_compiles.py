"""The kernels compile for a Hopper device, which needs none; the interpreter accepts what Triton does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specstream.kernels.triton_attend import _attend_kernel
from specstream.kernels.triton_linear import _linear_kernel
from specstream.kernels.triton_merge import _merge_kernel
from specstream.kernels.triton_merge_states import BLOCK_ROWS, _merge_states_kernel
from specstream.kernels.triton_swiglu import BLOCK, _silu_and_mul_kernel, _swiglu_kernel

TYPES = {"query": "*bf16", "kv": "*bf16", "own_key": "*bf16", "own_value": "*bf16", "out": "*bf16", "scale": "fp32"}
TYPES |= {name + str(i): "*bf16" for name in ("weight", "bias", "out") for i in range(3)} | {"x": "*bf16"}
TYPES |= {name: "*bf16" for name in ("gate", "up", "gate_weight", "up_weight", "gate_bias", "up_bias")}
TYPES |= {"ancestors": "*i64", "part_out": "*fp32", "part_lse": "*fp32", "state_out": "*fp32", "state_lse": "*fp32"}
TYPES |= {name: "*i32" for name in ("row_start", "row_count", "block_table", "key_count", "position", "append_table")}
TYPES |= {name: "*i32" for name in ("first_part", "part_count")}


def build(kernel, num_warps=4, num_stages=3, **constants):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.endswith("_stride")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages})


for tokens in (256, 48):
    for own in (False, True):
        for dim in (80, 128):
            built = build(
                _attend_kernel, KV_HEADS=8, GROUP=4, TOKENS=tokens, HEAD_DIM=dim, PADDED_DIM=128, BLOCK_ROWS=32,
                BLOCK_KEYS=64, OWN=own, WIDEN=False,
            )
            print("buffers", built.asm["ttgir"].count("local_alloc : () -> !ttg.memdesc<2x64x128xbf16"))
build(_merge_kernel, HEAD_DIM=80, PADDED_DIM=128, BLOCK_PARTS=64, PADDED_SEATS=8)
for out, inner, stages in ((8, 512, 4), (64, 128, 3)):
    sizes = {"BLOCK_ROWS": 16, "BLOCK_OUT": out, "BLOCK_IN": inner}
    build(_linear_kernel, 2, stages, WEIGHTS=3, BIAS=False, WHOLE=True, WIDEN=False, **sizes)
for rows, out, inner, stages in ((16, 8, 512, 4), (64, 32, 128, 3)):
    sizes = {"BLOCK_ROWS": rows, "BLOCK_OUT": out, "BLOCK_IN": inner}
    for bias, whole in ((False, True), (True, False)):
        built = build(_swiglu_kernel, 2, stages, BIAS=bias, WHOLE=whole, WIDEN=False, **sizes)
        assert built.metadata.shared <= (rows + 2 * out) * inner * 2 * stages
build(_silu_and_mul_kernel, BLOCK=BLOCK)
TYPES |= {"a_out": "*fp32", "b_out": "*bf16", "a_lse": "*fp32", "b_lse": "*fp32", "lse": "*fp32"}
build(_merge_states_kernel, HEAD_DIM=80, PADDED_DIM=128, BLOCK_ROWS=BLOCK_ROWS)

from specstream.kernels import accept_seats, accept_tiles, draft_rows

TYPES |= {name: "*i32" for name in ("counts", "candidates_count", "accepted", "computed", "slots")}
TYPES |= {name: "*i64" for name in ("candidates", "positions", "seeds", "produced", "tokens", "row_token", "step")}
TYPES |= {name: "*i64" for name in ("length", "most_length", "input_ids", "position_ids", "logit_rows", "best_key")}
TYPES |= {name: "*fp64" for name in ("tops", "masses", "row_top", "row_mass", "sums", "draft_probabilities")}
TYPES |= {"scores": "*fp32", "best": "*fp32", "do_sample": "*i1"}
sizes = {"TILE": 1024, "TILES": 256, "ROWS": 16}
kernels = (accept_tiles.survey_kernel, accept_tiles.reduce_kernel, accept_seats.decide_kernel)
for proposing, standard in ((False, False), (False, True), (True, False), (True, True)):
    drawn = (accept_tiles.weigh_kernel, accept_seats.draw_kernel) if standard else ()
    absent = {"row_start": None} if proposing else {"step": None}
    for kernel in (*kernels, *drawn):
        given = sizes | absent | {"COUPLED": not standard, "STANDARD": standard, "PROPOSING": proposing}
        build(kernel, **{name: value for name, value in given.items() if name in kernel.arg_names})
for rows in (1, 2):
    build(draft_rows._place_kernel, DEPTH=12, ROWS=rows, BLOCK_TOKENS=64, BLOCKS=32)

from specstream.kernels import stamp, upload

TYPES |= {"here": "*i64", "there": "*i64"}
build(upload._upload_kernel, TILE=1024)
TYPES["times"] = "*i64"
build(stamp._stamp_kernel, 1)

from specstream.kernels import noisy_scores

TYPES["out"] = "*fp64"
build(noisy_scores._noise_kernel, TILE=1024)

from specstream.kernels import process, survivors, threshold, threshold_passes

KEYS = ("best_key", "least_key", "bound_key", "threshold_key", "survivors", "survivor_count")
TYPES |= {name: "*i64" for name in (*KEYS, "sums", "states", "bound_left", "threshold_left")}
TYPES |= {"logits": "*bf16", "temperature": "*fp32", "min_p": "*fp32", "top_k": "*i32", "top_p": "*fp64"}
TYPES |= {"equal": "*i32"}
build(process._scale_kernel, TILE=1024)
build(process._count_equal_kernel, TILE=1024)
build(process._filter_kernel, TILE=1024, TILES=256)
build(survivors.gather_kernel, BITS=8, CAPACITY=512, TILE=1024)
alone, gathered = {"survivor_count": None, "CAPACITY": 0}, {"CAPACITY": 512}
for mass, bits, few in ((False, 8, alone), (True, 4, alone), (True, 4, gathered)):
    TYPES["wanted"] = "*fp64" if mass else "*i32"
    sizes, absent = {"MASS": mass, "BITS": bits, **few}, {"survivors": None} if few is alone else {}
    for number in (0, 1, 2):
        absent_least = {"least_key": None} if few is alone else {}
        build(threshold_passes.search_kernel, PASS=number, TILE=1024, **sizes, **absent_least)
    build(threshold.finish_kernel, 8, **sizes, **absent)
print("done")
"""


def test_kernels_compile_for_hopper_and_keep_two_tiles_in_flight(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["buffers 2"] * 8 + ["done"]
