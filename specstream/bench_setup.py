"""What both benchmarks set up: models by preset or directory, and KV memory of which a given share is resident."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from specstream import api
from specstream.bench_machine import give_memory_back
from specstream.cli import UsageError
from specstream.closest import did_you_mean
from specstream.engine import Engine
from specstream.errors import InvalidOption, OutOfBudget
from specstream.graph import AttentionSpec, ModelSpec, PartitionedModel
from specstream.idle import idle_bytes
from specstream.memory import MemoryPlan, plan_memory
from specstream.models.load import load_model
from specstream.models.presets import PRESETS, dummy_model, preset_config
from specstream.models.rope import max_positions, transformers_parts
from specstream.options import Options
from specstream.planning import kv_seen, window_of
from specstream.profiles import device_profile
from specstream.ring import Fill, longer_ring
from specstream.round_work import NO_DRAFT, DraftWork

UNLIMITED = 1 << 60
"""Bytes: more than any machine has."""
FLAGS = {"max_model_len": "context", "max_num_seqs": "batch", "num_speculative_tokens": "depth", "preset": "target"}
"""Options that a benchmark has flags of its own for."""


@dataclass(frozen=True)
class BenchModel:
    """A model to measure."""

    name: str
    module: nn.Module
    rope_note: str = ""
    """What was done to its rotary embedding, if anything was."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a round reads: an embedding table that is not also the head is only looked up in."""
        untyped: Any = self.module
        table, head = untyped.get_input_embeddings().weight, untyped.get_output_embeddings().weight
        total = sum(parameter.nbytes for parameter in self.module.parameters())
        return total if head is table else total - int(table.nbytes)

    @property
    def draft_work(self) -> DraftWork:
        """A step of it as a draft."""
        untyped: Any = self.module
        itemsize = next(self.module.parameters()).itemsize
        return DraftWork(self.read_bytes, untyped.config.num_hidden_layers, itemsize)

    def figures(self) -> dict[str, Any]:
        """For a report."""
        return {"name": self.name, "parameters": self.parameters, "rope": self.rope_note or None}


@contextmanager
def named_as_typed(flags: Mapping[str, str] = FLAGS) -> Iterator[None]:
    """Lets refusals of options name a command's own flags: the benchmarks', if no others are given."""
    try:
        yield
    except InvalidOption as error:
        raise error.renamed(flags) from error
    except OutOfBudget as error:
        texts = [error.reason, error.way_out]
        for name, flag in flags.items():
            texts = [re.sub(rf"\b{name}\b", flag, text) for text in texts]
        raise OutOfBudget(*texts) from error


def bench_model(name: str, max_model_len: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> BenchModel:
    """A preset with random weights, or the model in a directory.

    Raises:
        UsageError: it is neither.
    """
    if name in PRESETS:
        config, note = preset_config(name, max_model_len)
        return BenchModel(name, dummy_model(config, dtype, device, seed), note)
    if not Path(name).expanduser().is_dir():
        meant = did_you_mean(name, PRESETS)
        known = f"the presets are {', '.join(PRESETS)}"
        raise UsageError(f"{name}: no such folder, and no preset; {known}{meant and '. '}{meant}")
    logging.disable_progress_bar()
    module, _, loaded_name = load_model(Path(name).expanduser(), dtype, device)
    return BenchModel(loaded_name, module)


class BenchModels:
    """Makes models, and engines of a target alone; the latest target is kept, and what was captured of it."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[object, ...], BenchModel] | None = None
        self._captured: tuple[int, PartitionedModel] | None = None
        """And up to which length it is right."""

    def target(self, name: str, max_model_len: int, dtype: torch.dtype, device: torch.device) -> BenchModel:
        """As `bench_model`; the one that is kept, if that has the same weights and rotary embedding."""
        rope = preset_config(name, max_model_len)[1] if name in PRESETS else ""
        key = name, rope, dtype, device
        if self._kept is None or self._kept[0] != key:
            self.forget()
            self._kept = key, bench_model(name, max_model_len, dtype, device)
        return self._kept[1]

    def engine(self, target: BenchModel, options: dict[str, Any]) -> Engine:
        """`specstream.compile(target, None, **options)`, of a target that this has made."""
        settings, length = Options.from_keywords(**options), options["max_model_len"]
        settings.check_without_draft()
        if self._captured is None or self._captured[0] < length:
            self._captured = length, api.captured_model("target", target.module, target.name, length, settings)
        return api.build_engine(settings, self._captured[1], None)

    def forget(self) -> None:
        """Frees the memory of what is kept."""
        self._kept = self._captured = None
        give_memory_back()


def memory_options(
    target: BenchModel, options: dict[str, Any], resident: float, draft: BenchModel | None = None
) -> dict[str, Any]:
    """`options` with every KV size that was left open, so that a share of each request's history is resident.

    Args:
        options: of `specstream.compile`, with max_model_len, max_num_seqs and num_speculative_tokens; a gpu_kv_budget
            among them is left as it is.
        resident: from 0 (as little as works, with a ring of full size) to 1 (all).
        draft: what drafts, if anything does.

    Raises:
        UsageError: both a share and a gpu_kv_budget.
    """
    if "gpu_kv_budget" in options:
        if resident:
            raise UsageError("--resident and --gpu-kv-budget both say what stays on the device; give one of them")
        return options
    settings, device = Options.from_keywords(draft and draft.name, **options), next(target.module.parameters()).device
    spec, free = _kv_spec(target), None if device.type == "cpu" else UNLIMITED
    plan = plan_memory(settings, spec, weights=0, free_host=UNLIMITED, free_device=free)
    slots = plan.staging_slots
    fill = Fill(plan.layout.block_bytes, plan.chunks_per_group, plan.layout.chunks_of(plan.max_model_len))
    if free is not None and resident < 1 and settings.staging_slots == "auto":
        work = NO_DRAFT if draft is None else _draft_work(draft, settings, plan.max_model_len, target)
        idle = idle_bytes(settings, device_profile(device), work)
        slots = longer_ring(spec.num_layers, slots, fill, idle, UNLIMITED)
    requests = _device_chunks(plan, resident) * plan.layout.chunk_bytes * options["max_num_seqs"]
    return options | {
        "chunk_tokens": plan.layout.chunk_tokens,
        "group_chunks": plan.chunks_per_group,
        "staging_slots": slots,
        "gpu_kv_budget": slots * fill.slot_bytes + requests,
    }


def given_options(given: argparse.Namespace) -> dict[str, Any]:
    """A command's options as they were given, for a report."""
    return {name: value for name, value in vars(given).items() if name not in ("run", "json", "debug", "version")}


def memory_figures(engine: Engine) -> dict[str, Any]:
    """The sizes that were planned."""
    memory = engine.memory
    return {
        "chunk_tokens": memory.layout.chunk_tokens,
        "group_chunks": memory.chunks_per_group,
        "staging_slots": memory.staging_slots,
        "device_kv_bytes": memory.device_kv,
        "workspace_bytes": memory.workspace,
        "planned_device_bytes": memory.device_bytes,
    }


def _device_chunks(plan: MemoryPlan, resident: float) -> int:
    """Chunks on the device for each request: the resident ones and, unless those are all, a tail."""
    total = plan.layout.chunks_of(plan.max_model_len)
    return min(total, int(resident * total) + plan.tail_slots)


def _draft_work(draft: BenchModel, options: Options, longest: int, target: BenchModel) -> DraftWork:
    window = window_of(options, longest, itself=draft.module is target.module)
    return replace(draft.draft_work, kv_bytes=kv_seen(_kv_spec(draft), window))


def _kv_spec(model: BenchModel) -> ModelSpec:
    """What sizes of KV depend on, from a transformers model's configuration."""
    module = model.module
    config: Any = transformers_parts(module)[0].config.get_text_config()
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = (AttentionSpec(layer, "", heads, kv_heads, head_dim, 1.0) for layer in range(config.num_hidden_layers))
    tensor = next(module.parameters())
    return ModelSpec(model.name, config.vocab_size, tensor.dtype, tensor.device, max_positions(module), tuple(layers))
