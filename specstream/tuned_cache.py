"""Tuned settings, kept in the user's cache folder: a file for each pair of models and what is asked of an engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from specstream.caller import warn_caller
from specstream.errors import InvalidOption
from specstream.graph import ModelSpec, PlannableModel
from specstream.memory import resolve_max_model_len
from specstream.options import Options, parse_size
from specstream.profile_cache import cache_folder, environment, write_whole
from specstream.tuned_settings import BRANCHES, WINDOW, Drafting, TunedSettings, open_settings

UNSET = {BRANCHES: 0, WINDOW: None}
"""Values that options do not have."""


def tuned_file(options: Options, target: PlannableModel, draft: PlannableModel | None) -> Path:
    """Where what was tuned for such an engine is kept: models by their shapes, options by what rates depend on."""
    budget = options.gpu_kv_budget
    asked = [
        resolve_max_model_len(options, target.spec),
        options.max_num_seqs,
        budget if budget in ("auto", "min") else parse_size("gpu_kv_budget", budget),
        options.draft_window,
        {field.name: getattr(options, field.name) for field in fields(TunedSettings)},
    ]
    models = [None if model is None else _shape(model) for model in (target, draft)]
    text = json.dumps([*asked, *models, draft is target])
    return cache_folder() / "tuned" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def store_tuned(settings: TunedSettings, tokens_per_second: float, target: ModelSpec, file: Path) -> None:
    """Writes the file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    kept = {
        "target": target.name,
        "environment": environment(target.device),
        "settings": asdict(settings),
        "tokens_per_second": tokens_per_second,
    }
    write_whole(json.dumps(kept, indent=2) + "\n", file)


def stored_tuned(options: Options, target: PlannableModel, draft: PlannableModel | None) -> TunedSettings | None:
    """What was tuned for such an engine, if anything was and nothing has changed since."""
    return read_tuned(target.spec, tuned_file(options, target, draft)) if open_settings(options) else None


def read_tuned(target: ModelSpec, file: Path) -> TunedSettings | None:
    """What `store_tuned` has written; None if nothing was, or, with a warning that says why, if that is of no use."""
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_caller(f"tuned settings cannot be read ({error}): automatic ones are used")
        return None
    try:
        kept = json.loads(data)
        settings, then = _checked(kept["settings"]), dict(kept["environment"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        warn_caller(f"{file} holds no tuned settings ({type(error).__name__}: {error}): automatic ones are used")
        return None
    now = environment(target.device)
    changed = [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]
    if changed:
        warn_caller(
            f"settings were tuned for {target.name} before a change ({'; '.join(changed)}): automatic ones "
            f"are used. Tune again, or delete {file}"
        )
        return None
    return settings


def _checked(values: Any) -> TunedSettings:
    """Raises ValueError, TypeError or KeyError for what are no settings."""
    settings = TunedSettings(**values)
    for field in fields(TunedSettings):
        value = getattr(settings, field.name)
        if field.name in UNSET and value is UNSET[field.name]:
            continue
        try:
            if value not in get_args(Drafting) if field.name == "drafting" else not isinstance(value, int):
                raise ValueError(f"{field.name} is {value!r}")
            options: dict[str, Any] = {"max_num_seqs": 2, "drafting": "lookahead"} | {field.name: value}
            Options(**options)
        except InvalidOption as error:
            raise ValueError(str(error)) from error
    return settings


def _shape(model: PlannableModel) -> list[Any]:
    spec = model.spec
    heads = [[each.num_heads, each.num_kv_heads, each.head_dim] for each in spec.attentions]
    return [spec.vocab_size, str(spec.dtype), spec.device.type, heads, model.weight_bytes]
