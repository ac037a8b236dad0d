"""What a caller gives as prompts, as token ids that are known to be right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from specstream.errors import InvalidOption


def token_ids(prompt: Any, vocab_size: int, max_model_len: int) -> list[int]:
    """A prompt as Python ints, from a list, a tensor, or an array.

    Raises:
        InvalidOption: it is none of these, it is empty, has ids out of range, or leaves no room for output.
    """
    if isinstance(prompt, Tensor):
        check_tensor("prompt", prompt)
        if prompt.dtype.is_floating_point or prompt.dtype.is_complex or prompt.dtype == torch.bool:
            raise InvalidOption("prompt", prompt.dtype, "token ids, which are integers", "Convert it with .long().")
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Set | Mapping):
        way_out = "Encode it with the model's tokenizer first." if isinstance(given, str | bytes) else ""
        raise InvalidOption("prompt", prompt, "a sequence of token ids", way_out)
    ids = []
    for token in given:
        if isinstance(token, list | tuple) or (isinstance(token, Tensor) and token.dim()):
            raise InvalidOption("prompt", prompt, "one prompt, a flat sequence of token ids", "Submit rows one by one.")
        ids.append(token_id("prompt", token, vocab_size))
    if not ids:
        raise _empty_prompt()
    if len(ids) >= max_model_len:
        allowed = f"at most {max_model_len - 1} tokens, since max_model_len is {max_model_len} and output needs room"
        way_out = "Shorten the prompt or compile with a larger max_model_len."
        raise InvalidOption("prompt", f"{len(ids)} tokens", allowed, way_out)
    return ids


def token_id(name: str, value: object, vocab_size: int, tail: str = "") -> int:
    """A token id as an int; `tail` is what else to say of what is allowed.

    Raises:
        InvalidOption: it is no integer, or none that the target knows.
    """
    try:
        token = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        token = -1
    if not 0 <= token < vocab_size:
        raise InvalidOption(name, value, f"token ids from 0 to {vocab_size - 1}{tail}")
    return token


def _empty_prompt() -> InvalidOption:
    return InvalidOption("prompt", [], "at least one token", "Start from the model's first special token.")


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose values cannot be read."""
    if tensor.layout != torch.strided:
        raise InvalidOption(name, f"a tensor of layout {tensor.layout}", "a dense tensor", "Call .to_dense() first.")
    if isinstance(tensor, FakeTensor):
        raise InvalidOption(name, "a fake tensor", "a tensor that has values", "Make it outside of FakeTensorMode.")
    if tensor.is_meta:
        raise InvalidOption(name, "a tensor on the meta device", "a tensor that has values", "Make it on the CPU.")


def batch(
    input_ids: Any, attention_mask: Any, pad_token_id: int, vocab_size: int, *, infer_mask: bool = False
) -> tuple[Tensor, list[list[int]]]:
    """A batch as a tensor, and each prompt without its padding.

    Args:
        infer_mask: whether `pad_token_id` in a tensor that comes without a mask is padding.

    Raises:
        InvalidOption: it is no batch, or the mask does not belong to it.
    """
    if isinstance(input_ids, np.ndarray) and input_ids.dtype.kind in "biuf":
        kind = np.int64 if input_ids.dtype.kind in "iu" else input_ids.dtype
        input_ids = torch.from_numpy(input_ids.astype(kind))
    if not isinstance(input_ids, Tensor):
        input_ids, padding = _padded(input_ids, pad_token_id, vocab_size)
        if attention_mask is None:
            attention_mask = padding
    check_tensor("input_ids", input_ids)
    if input_ids.dim() != 2 or not input_ids.numel():
        raise InvalidOption("input_ids", f"shape {tuple(input_ids.shape)}", "shape [batch, length], neither of them 0")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InvalidOption("input_ids", input_ids.dtype, "int64 or int32 token ids")
    if attention_mask is None and not (infer_mask and (input_ids == pad_token_id).any()):
        return input_ids, [row.tolist() for row in input_ids]
    if attention_mask is None:
        attention_mask = input_ids != pad_token_id
    keep = _kept(attention_mask, input_ids.shape)
    _check_holes(keep)
    return input_ids, [row[seen].tolist() for row, seen in zip(input_ids.cpu(), keep, strict=True)]


def _padded(rows: Any, pad_token_id: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Lists of token ids as a left-padded tensor and its mask."""
    way_out = "Pass what a tokenizer returns as **inputs." if isinstance(rows, Mapping) else ""
    given = [_listed(row) for row in rows] if _is_list(rows) else [None]
    if not all(map(_is_list, given)):
        allowed = "a tensor or array [batch, length], or a list of lists of token ids"
        raise InvalidOption("input_ids", rows, allowed, way_out)
    rows = given
    lists = [[token_id("prompt", token, vocab_size) for token in row] for row in rows]
    width = max((len(row) for row in lists), default=0)
    if not width:
        raise InvalidOption("input_ids", rows, "at least one prompt of at least one token")
    if not all(lists):
        raise _empty_prompt()
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in lists]
    return torch.tensor([[pad_token_id] * (width - len(row)) + row for row in lists]), torch.tensor(mask)


def _listed(row: Any) -> Any:
    """A row of a batch; a list if it was a tensor or an array."""
    if isinstance(row, Tensor):
        check_tensor("input_ids", row)
    return row.tolist() if isinstance(row, Tensor | np.ndarray) else row


def _is_list(value: object) -> bool:
    return isinstance(value, Seq) and not isinstance(value, str | bytes)


def _check_holes(keep: Tensor) -> None:
    """Refuses rows with padding between two tokens: what positions and processors make of it is nobody's wish."""
    for row, seen in enumerate(keep):
        places = seen.nonzero().flatten()
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            way_out = "If its pad_token_id stands for a token here, give an attention_mask of ones."
            allowed = "padding at the left or at the right of a row"
            raise InvalidOption("attention_mask", f"padding inside row {row}", allowed, way_out)


def _kept(mask: object, shape: torch.Size) -> Tensor:
    """bool [batch, length], from an attention mask."""
    allowed = "a tensor of 0 and 1, of the shape of input_ids"
    if isinstance(mask, np.ndarray) and mask.dtype.kind in "biuf":
        mask = torch.from_numpy(mask.copy())
    if not isinstance(mask, Tensor):
        raise InvalidOption("attention_mask", mask, allowed, "Make it one with torch.tensor.")
    check_tensor("attention_mask", mask)
    if mask.shape != shape:
        raise InvalidOption("attention_mask", f"shape {tuple(mask.shape)}", f"the shape of input_ids, {tuple(shape)}")
    if mask.is_complex():
        raise InvalidOption("attention_mask", mask.dtype, allowed)
    mask = mask.cpu()
    wrong = mask[(mask != 0) & (mask != 1)]
    if len(wrong):
        way_out = "Give 1 where there is a token and 0 where there is padding."
        raise InvalidOption("attention_mask", wrong[0].item(), allowed, way_out)
    empty = (mask == 0).all(1).nonzero()
    if len(empty):
        way_out = "Take the row out, or start it from the model's first special token."
        raise InvalidOption("attention_mask", f"row {int(empty[0])} all 0", "at least one 1 in each row", way_out)
    return mask.bool()
