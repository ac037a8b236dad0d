"""The arguments of `specstream.plan` that are no options of an engine, checked before anything is made of them."""

from __future__ import annotations

import os

import torch

from specstream.errors import InvalidOption
from specstream.fit_setup import LEAST_CONTEXT, MOST_CONTEXT
from specstream.options import SELF

Source = str | os.PathLike[str]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_arguments(target: object, draft: object, context: object, device: object, dtype: object) -> None:
    """As `specstream.plan` names them.

    Raises:
        InvalidOption: one of them is of no type, or has no value, that it may have.
    """
    model = "the name of a preset, a directory, or a config.json"
    if not _is_source(target):
        raise InvalidOption("target", target, model, _loaded(target))
    word = draft.lower() if isinstance(draft, str) else ""
    if not (draft is None or _is_source(draft)) or (draft != SELF and word in (SELF, "none")):
        raise InvalidOption("draft", draft, f'{model}, "{SELF}" or None', _loaded(draft))
    if isinstance(context, bool) or not isinstance(context, int) or not LEAST_CONTEXT <= context <= MOST_CONTEXT:
        raise InvalidOption("context", context, f"a number of tokens from {LEAST_CONTEXT} to {MOST_CONTEXT}")
    if not isinstance(device, str):
        way_out = "Leave it out for an H200, or name the device that you would use."
        raise InvalidOption("device", device, 'the name of a listed device, or "auto"', way_out)
    if dtype is not None and dtype not in DTYPES:
        raise InvalidOption("dtype", dtype, f"None or {' or '.join(map(str, DTYPES))}")


def check_questions(**questions: object) -> None:
    """What is either asked or not.

    Raises:
        InvalidOption: one is neither True nor False.
    """
    for name, asked in questions.items():
        if not isinstance(asked, bool):
            raise InvalidOption(name, asked, "True or False", "The answer is in the report.")


def _is_source(model: object) -> bool:
    return isinstance(model, str | os.PathLike) and isinstance(os.fspath(model), str)


def _loaded(model: object) -> str:
    return "Of a model that is loaded, specstream.compile plans." if isinstance(model, torch.nn.Module) else ""
