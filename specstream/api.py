"""`specstream.compile`: from models to an engine."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specstream.caller import warn_caller
from specstream.closest import closest
from specstream.compiler import compile_model, lower_model
from specstream.draft import FEED_TOKENS
from specstream.engine import Engine
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.graph import PartitionedModel
from specstream.memory import resolve_batched_tokens, resolve_max_model_len
from specstream.models.load import load_model
from specstream.models.presets import PRESETS
from specstream.models.rope import inherited_rope, max_positions
from specstream.options import SELF, Options
from specstream.parts import DEVICES, make_parts

Model = nn.Module | str | Path

LEAST_MODEL_LEN = 3
"""Tokens: the probe runs a model in three segments."""


def compile(
    target: Model, draft: Model | None = None, *, dtype: Any = None, device: Any = None, **options: Any
) -> Engine:
    """Captures a target and a draft, plans memory, and returns an engine.

    Args:
        target, draft: transformers models, plain modules `forward(input_ids, position_ids)`, or names or local
            directories of checkpoints. A draft of "self" is the target itself with a window of its KV, without
            further weights; None turns speculation off.
        dtype: torch dtype for models loaded by name; None: on a CPU float32, else the checkpoint's.
        device: "cpu" or "cuda" for models loaded by name; None: a CUDA device if there is one.
        options: fields of `Options`.

    Raises:
        InvalidOption: an option's value, or two models that do not go together.
        UnsupportedModel: a model that cannot be represented exactly.
        OutOfBudget: memory that does not suffice, with the figures.
    """
    settings = Options.from_keywords(draft, **options)
    if draft is None:
        settings.check_without_draft()
    if draft is None or settings.drafting == "off":
        draft, settings = None, settings.without_draft
    _check_device(device)
    if isinstance(draft, str) and draft != SELF and draft.lower() in (SELF, "none"):
        raise InvalidOption("draft", draft, f'a model, its name or directory, "{SELF}" or None')
    for role, model in {"target": target, "draft": draft}.items():
        for name, value, way_out in (("dtype", dtype, ".to(dtype)"), ("device", device, ".to(device)")):
            if isinstance(model, nn.Module) and value is not None:
                allowed = f"None for a {role} that is a module"
                raise InvalidOption(name, value, allowed, f"Convert it with {way_out} first.")
        if not isinstance(model, nn.Module | str | Path) and not (role == "draft" and model is None):
            raise InvalidOption(role, model, "an nn.Module, the name of a model, or a directory")
    target_module, tokenizer, target_name = _loaded("target", target, dtype, device)
    limit = settings.max_model_len if isinstance(settings.max_model_len, int) else None
    if limit is not None and limit < LEAST_MODEL_LEN:
        raise InvalidOption("max_model_len", limit, f"at least {LEAST_MODEL_LEN}, so that the capture can be proven")
    target_model = captured_model("target", target_module, target_name, limit, settings)
    draft_model = None
    if draft == SELF:
        draft_model = target_model
    elif draft is not None:
        draft_module, draft_tokenizer, draft_name = _loaded("draft", draft, dtype, device)
        check_tokenizers(tokenizer, draft_tokenizer)
        longest = resolve_max_model_len(settings, target_model.spec)
        with inherited_rope(draft_module, target_module, longest):
            reach = min(longest, max_positions(draft_module) or sys.maxsize)
            draft_model = captured_model("draft", draft_module, draft_name, reach, settings)
    if settings.rejection_sample_method == "synthetic":
        warn_caller(
            "acceptance is made up (rejection_sample_method='synthetic'): the output of this engine is not the "
            "target's; it is for measuring costs"
        )
    defaults = getattr(target_module, "generation_config", None)
    engine = build_engine(settings, target_model, draft_model, tokenizer, defaults)
    engine.target = weakref.ref(target_module) if isinstance(target, nn.Module) else None
    return engine


def _check_name(role: str, name: str) -> None:
    """Refuses what is nearly the name of a preset, or "self": it is not asked of the hub, where it would be anybody's.

    Raises:
        InvalidOption: and no folder has that name.
    """
    meant = closest(name, [*PRESETS, SELF] if role == "draft" else PRESETS)
    if meant is None or "/" in name or Path(name).exists():
        return
    question = "" if meant == name else f"Did you mean {meant!r}? "
    preset = f"{meant!r} is a preset, for plan and bench: an engine needs weights." if meant in PRESETS else ""
    allowed = "a directory with a causal language model, its name on the hub, or an nn.Module"
    raise InvalidOption(role, name, allowed, f"{question}{preset}".rstrip())


def _loaded(role: str, model: Model, dtype: Any, device: Any) -> tuple[nn.Module, Any, str]:
    """As `load_model`; refusals say which of the two models is meant."""
    if isinstance(model, str):
        _check_name(role, model)
    try:
        return load_model(model, dtype, device)
    except InvalidOption as error:
        refused = error.renamed({"model": role})
        if role == "draft":
            refused = InvalidOption(role, error.given, f'{error.allowed}, "{SELF}" or None', error.way_out)
        raise refused from error


def _check_device(device: Any) -> None:
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = None
    if kind not in DEVICES:
        raise InvalidOption("device", device, f"None or {' or '.join(map(repr, DEVICES))}, with or without an index")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidOption("device", device, '"cpu" here: torch sees no CUDA device', "Install a CUDA build of torch.")


def captured_model(
    role: str, model: nn.Module, name: str, max_model_len: int | None, options: Options
) -> PartitionedModel:
    """A model captured and cut, for CUDA devices compiled too; refusals say which of the two models is meant."""
    try:
        partitioned = compile_model(model, name, max_model_len, role)
        if partitioned.spec.device.type == "cpu":
            return partitioned
        verified = options.max_num_seqs * (options.most_candidates + 1)
        batched = resolve_batched_tokens(options, own_device=True)
        most_rows = max(batched + verified, options.max_num_seqs * FEED_TOKENS)
        return lower_model(model, partitioned, max_model_len, role, most_rows)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{role} {error.module}".rstrip(), error.reason, error.way_out) from error


def build_engine(
    options: Options,
    target: PartitionedModel,
    draft: PartitionedModel | None,
    tokenizer: Any = None,
    generation_config: Any = None,
) -> Engine:
    """An engine for models that are captured and cut already: plans memory, allocates it, starts the lanes.

    Raises:
        InvalidOption: two models that do not go together.
        OutOfBudget: memory that does not suffice.
    """
    return Engine(make_parts(options, target, draft), tokenizer, generation_config)


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuses a draft whose token ids mean something else, where both tokenizers are known.

    Vocabularies may differ in length: the longer one is padding.

    Raises:
        InvalidOption: with the first id that differs.
    """
    if target is None or draft is None:
        return
    by_id = [{index: token for token, index in t.get_vocab().items()} for t in (target, draft)]
    for index in sorted(by_id[0].keys() & by_id[1].keys()):
        ours, theirs = (tokens[index] for tokens in by_id)
        if ours != theirs:
            raise InvalidOption(
                "draft",
                f"a tokenizer whose id {index} is {theirs!r}",
                f"the target's tokenizer, whose id {index} is {ours!r}",
                "Use a draft of the same family, or draft=None.",
            )
