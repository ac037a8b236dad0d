"""For what arguments Triton compiles a kernel anew: not for other numbers of requests than those loaded before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
from collections import defaultdict

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from specstream.attention_choice import KernelChoice
from specstream.graph import AttentionSpec, ModelSpec
from specstream.kernels import accept
from specstream.kernels.process import process
from specstream.kv import ChunkLayout, DeviceStore
from specstream.load_kernels import load_kernels, seat_counts

backend, found = make_backend(GPUTarget("cuda", 90, 32)), {}


def record(kernel, *given, grid, warmup, **named):
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    _, arguments, options = bind(*given, **named)
    found[seats].add((kernel.__name__, str(arguments), str(sorted(options.items()))))


jit.JITFunction.run = record
CPU, DEPTH, VOCAB, MOST, BF16 = torch.device("cpu"), 4, 1000, 11, torch.bfloat16


def choose(seats):
    def of(dtype, *shape):
        return torch.zeros(*shape, dtype=dtype)

    given = accept.Seats(
        of(torch.int32, seats), of(torch.int64, seats, DEPTH), *(of(torch.int64, seats) for _ in range(2)),
        of(torch.bool, seats),
    )
    rows, drawn_from = seats * (DEPTH + 1), of(torch.float64, seats, DEPTH, VOCAB)
    out = of(torch.int32, seats), of(torch.int64, seats, DEPTH + 1)
    limits = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float32}
    for used in ({}, limits):
        for method in ("coupled", "standard"):
            scores, key = process(of(BF16, rows, VOCAB), **{name: of(kind, rows) for name, kind in used.items()})
            best = accept.Best(key, of(torch.float32, seats, DEPTH + 1))
            accept.accept(given, scores, of(torch.int32, seats), method, drawn_from, out=out, best=best)
            scores, key = process(of(BF16, seats, VOCAB), **{name: of(kind, seats) for name, kind in used.items()})
            best = accept.Best(key, of(torch.float32, seats, DEPTH))
            accept.propose(given, scores, of(torch.int64, 1), method, "probabilistic", drawn_from, best)


attention = AttentionSpec(0, "", 32, 8, 128, 1.0)
model = ModelSpec("m", VOCAB, BF16, CPU, None, (attention,))
choice = KernelChoice(DeviceStore(ChunkLayout.of(model, 128), 65, 4, 64, CPU, False), model, 65, None)


def attend(seats):
    rounds = choice.without_rows(seats, DEPTH + 1)
    rows = rounds.tables.sizes.rows
    query, key, value = (torch.zeros(1, rows, n, 128, dtype=BF16).transpose(1, 2) for n in (32, 8, 8))
    rounds.append(0, key, value, {})
    rounds.local(0, query, attention, {})
    rounds.attend(0, 0, None, query, attention, None)
    rounds.merge(query, attention, {})


for seats in range(1, MOST + 1):
    found[seats] = set()
    choose(seats)
    attend(seats)
loaded = set().union(*(found[seats] for seats in seat_counts(MOST)))
for seats, variants in found.items():
    for variant in variants - loaded:
        print(seats, *variant)
print("of one request:", len(found[1]), "of any number:", len(loaded))
"""


def test_kernels_of_any_number_of_requests_are_those_loaded_before() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *unforeseen, counts = result.stdout.splitlines()
    assert not unforeseen
    one, any_number = (int(word) for word in counts.replace(",", "").split() if word.isdigit())
    assert one > 20
    assert any_number - one <= 3  # of the merge: how many partial results it takes at a time
