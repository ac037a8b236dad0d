"""The arguments of `specstream.plan`, checked: models without weights, a device's profile, options."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specstream.api import check_tokenizers
from specstream.cost import DeviceProfile
from specstream.errors import InvalidOption, UnsupportedModel
from specstream.fit_arguments import Source, check_arguments
from specstream.fit_setup import Setup
from specstream.memory import resolve_max_model_len
from specstream.models.presets import PRESETS
from specstream.models.rope import inherited_rope
from specstream.models.unloaded import unloaded_model, unloaded_tokenizer
from specstream.options import SELF, Options, Size, parse_size
from specstream.profiles import CPU_PROFILE, device_profile, named_profile
from specstream.shapes import ModelShapes, shapes_of

OWN_NAMES = {"max_model_len": "context", "max_num_seqs": "batch"}
"""Options that have arguments of their own here."""

_VOCABULARIES = (
    "the vocabularies have {} and {} tokens: with weights, a draft is refused if its token ids are not the target's"
)


def make_setup(
    target: Source,
    draft: Source | None,
    context: int,
    batch: int,
    device: str,
    fit_gpu: Size | None,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> tuple[Setup, tuple[str, ...]]:
    """What is asked about, and notes on the models; arguments are those of `specstream.plan`.

    Raises:
        InvalidOption: an argument.
        UnsupportedModel: a model whose shapes cannot be told without its weights.
    """
    for name, own in OWN_NAMES.items():
        if name in options:
            raise InvalidOption(name, options[name], f"none here: it is called {own}")
    check_arguments(target, draft, context, device, dtype)
    sizes = {"max_model_len": context, "max_num_seqs": batch}
    try:
        settings = Options.from_keywords(draft, **sizes, **options)
        if draft is None:
            settings.check_without_draft()
    except InvalidOption as error:
        raise error.renamed(OWN_NAMES) from error
    if draft is None or settings.drafting == "off":
        draft, settings = None, settings.without_draft
    profile, place = _profile(device, fit_gpu)
    if dtype is None and place.type == "cpu" and os.fspath(target) not in PRESETS:
        dtype = torch.float32  # as a checkpoint is loaded there
    target_module, target_name, *notes = unloaded_model("target", target, context, dtype)
    shapes = _shapes("target", target_module, target_name, place, context)
    stretches = os.fspath(target) in PRESETS
    try:
        resolve_max_model_len(settings, shapes.spec)
    except InvalidOption as error:
        raise error.renamed(OWN_NAMES) from error
    draft_shapes = shapes if draft == SELF else None
    if draft is not None and draft_shapes is None:
        draft_module, draft_name, note = unloaded_model("draft", draft, context, dtype)
        tokenizers = unloaded_tokenizer(target), unloaded_tokenizer(draft)
        check_tokenizers(*tokenizers)
        with inherited_rope(draft_module, target_module, context):
            draft_shapes = _shapes("draft", draft_module, draft_name, place, context)
        reach = draft_shapes.spec.max_positions
        if reach is not None and reach < context:
            note = f"the draft covers {reach} positions: beyond that nothing is drafted"
        notes.append(note)
        ours, theirs = shapes.spec.vocab_size, draft_shapes.spec.vocab_size
        if None in tokenizers and ours != theirs:
            notes.append(_VOCABULARIES.format(ours, theirs))
    setup = Setup(shapes, draft_shapes, profile, settings, device in ("auto", "cpu"), stretches)
    return setup, tuple(note for note in notes if note)


def _shapes(role: str, module: nn.Module, name: str, place: torch.device, context: int) -> ModelShapes:
    """As `shapes_of`; refusals say which of the two models is meant, as an engine's do."""
    try:
        return shapes_of(module, name, place, context)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{role} {error.module}".rstrip(), error.reason, error.way_out) from error


def _profile(device: str, fit_gpu: Size | None) -> tuple[DeviceProfile, torch.device]:
    if device == "auto":
        place = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        profile = device_profile(place)
    else:
        profile = named_profile("device", device)
        place = torch.device("cpu" if profile is CPU_PROFILE else "cuda")
    if fit_gpu is not None:
        if profile.device_memory_bytes is None:
            raise InvalidOption("fit_gpu", fit_gpu, f"None for {profile.name}, which has no memory of its own")
        profile = replace(profile, device_memory_bytes=parse_size("fit_gpu", fit_gpu))
    return profile, place
