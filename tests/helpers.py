"""What several test files share: models captured once a process, reference outputs, and a loop that serves requests."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from specstream.api import build_engine
from specstream.compiler import compile_model
from specstream.engine import Engine
from specstream.executor import CpuExecutor
from specstream.graph import PartitionedModel
from specstream.options import Options
from specstream.outputs import RequestOutput
from tests.architectures import VOCAB, build

torch.set_num_threads(1)  # a second thread for tiny tensors only waits: on a busy machine, 50 times as long


@cache
def model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, layers: int | None = None) -> nn.Module:
    """A tiny model that ends at no token of its own accord."""
    changes: dict[str, Any] = {} if name.startswith("plain") else {"eos_token_id": None}
    if layers is not None:
        changes["num_hidden_layers"] = layers
    return build(name, dtype, seed, **changes)


@cache
def captured(module: nn.Module) -> PartitionedModel:
    """A captured model; capturing takes about a second."""
    return compile_model(module, type(module).__name__, None)


def make_engine(
    target: nn.Module,
    draft: nn.Module | None = None,
    *,
    copy: Callable[[Tensor, Tensor], None] | None = None,
    **options: Any,
) -> Engine:
    """What `specstream.compile` makes of the models, with other copies between the tiers if asked."""
    engine = build_engine(
        Options.from_keywords(**options),
        captured(target),
        None if draft is None else captured(draft),
        generation_config=getattr(target, "generation_config", None),
    )
    if copy is not None:
        cpu_executor(engine)._copy = copy
    return engine


def cpu_executor(engine: Engine) -> CpuExecutor:
    assert isinstance(engine._executor, CpuExecutor)
    return engine._executor


@cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())


def named(value: object) -> str:
    """A value as a test's name: without addresses, which differ from process to process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def script(name: str) -> ModuleType:
    """A benchmark's module, which is no part of the package."""
    file = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures_of(name: str, *arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a benchmark writes of a run on the CPU."""
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--device", "cpu", "--json", str(file)])
    script(name).main()
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


@dataclass(frozen=True)
class Reference:
    """What a target produces alone."""

    tokens: list[int]
    gaps: list[float]
    """For each token, by how much its logit exceeds the second best."""


@cache
def reference(target: nn.Module, ids: tuple[int, ...], count: int) -> Reference:
    """Greedy decoding by the model itself: transformers' own generate with its own cache, or the plainest loop."""
    if isinstance(target, GenerationMixin):
        out: Any = target.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens, logits = out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)
    else:
        tokens, rows = [], []
        with torch.no_grad():
            for _ in range(count):
                text = torch.tensor([[*ids, *tokens]])
                output = target(text, torch.arange(text.shape[1])[None])
                rows.append((output["logits"] if isinstance(output, dict) else output)[0, -1])
                tokens.append(int(rows[-1].argmax()))
        logits = torch.stack(rows)
    assert len(tokens) == count
    best = logits.double().topk(2).values
    return Reference(tokens, (best[:, 0] - best[:, 1]).tolist())


@dataclass
class Request:
    """A request as a test serves it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    ends: tuple[int, ...] = ()
    joins: int = 0
    """Round before which it is submitted."""
    leaves: int | None = None
    """Rounds it may stay for before it is cancelled; None: until it is done."""
    tokens: list[int] = field(default_factory=list)
    """What steps have given so far."""
    output: RequestOutput | None = None


def serve(engine: Engine, requests: Sequence[Request], after_step: Callable[[], None] = lambda: None) -> None:
    """Submits requests when they join, cancels those that leave, and steps until none is left."""
    waiting = sorted(requests, key=lambda request: request.joins)
    serving: dict[int, Request] = {}
    rounds = 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0].joins <= rounds or not engine.has_unfinished):
            request = waiting.pop(0)
            number = engine.submit(request.prompt, max_new_tokens=request.max_new_tokens, eos_token_id=request.ends)
            request.joins, serving[number] = rounds, request
        for step in engine.step():
            request = serving[step.request_id]
            assert step.new_token_ids, "a step without tokens"
            request.tokens += step.new_token_ids
            request.output = step.output
        rounds += 1
        for number, request in serving.items():
            if request.leaves is not None and request.output is None and rounds - request.joins >= request.leaves:
                request.output = engine.cancel(number)
        after_step()
        assert rounds < 10_000
    check_free(engine)
    for request in requests:
        assert request.output is not None
        assert request.output.token_ids == request.tokens
        assert request.output.prompt_token_ids == list(request.prompt)


def check_free(engine: Engine) -> None:
    """Nothing is held once no request is left."""
    assert engine._scheduler.free_seats == list(range(engine.options.max_num_seqs))
    assert engine._executor.store.free_blocks == list(range(engine.memory.num_blocks))
    assert engine._host.used_bytes == 0


def expected(target: nn.Module, request: Request, count: int, max_model_len: int) -> tuple[list[int], str]:
    """The tokens a request must get, and why it ends, from a reference of `count` tokens."""
    room = min(request.max_new_tokens, max_model_len - len(request.prompt))
    tokens = reference(target, request.prompt, count).tokens[:room]
    assert len(tokens) == room, "the reference is too short"
    for index, token in enumerate(tokens):
        if token in request.ends:
            return tokens[: index + 1], "stop"
    return tokens, "length"


NEW_TOKENS = 24
OPTIONS: dict[str, Any] = {
    "chunk_tokens": 4,
    "max_model_len": 64,
    "gpu_kv_budget": "64KiB",
    "max_num_seqs": 3,
    "num_speculative_tokens": 3,
    "debug": True,
}


def best(ids: tuple[int, ...], count: int = NEW_TOKENS, target: nn.Module | None = None) -> list[int]:
    return reference(target or model("qwen3"), ids, NEW_TOKENS).tokens[:count]


def new_engine(**changes: Any) -> Engine:
    return make_engine(model("qwen3"), model("qwen3"), **OPTIONS | changes)


def step_to_end(engine: Engine) -> dict[int, list[int]]:
    """Tokens of each request, from steps alone."""
    tokens: dict[int, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens
