"""Named tensors that lie one behind the other, on a device and on the host, all of which move at once."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from specstream.device_copy import Transfer
from specstream.kernels.upload import upload
from specstream.streams import CurrentStream

Field = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape."""

ALIGNMENT = 16


class Mirror:
    """Both sides begin as zeros, and keep their places; the host's is pinned if the device is a CUDA device."""

    def __init__(self, fields: dict[str, Field], device: torch.device) -> None:
        starts, size = {}, 0
        for name, (dtype, shape) in fields.items():
            starts[name] = size
            size += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):  # they may be used outside of the caller's
            self._here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._current = CurrentStream(device) if device.type == "cuda" else None
        self._words = self._here.view(torch.int64), self._there.view(torch.int64)
        self._down = Transfer(self._here.data_ptr(), self._there.data_ptr(), size, to_device=False)

        def cut(whole: Tensor, name: str) -> Tensor:
            dtype, shape = fields[name]
            part = whole[starts[name] : starts[name] + prod(shape) * dtype.itemsize]
            return part.view(dtype).view(shape)

        self.device = {name: cut(self._there, name) for name in fields}
        """The device's side, by name."""
        self.host: dict[str, Any] = {name: cut(self._here, name).numpy() for name in fields}
        """The host's side, as numpy arrays."""

    def clear(self) -> None:
        """Makes the host's side zeros."""
        self._here.zero_()

    def upload(self) -> None:
        """On the current stream; the host's side may not be written before that is done."""
        if self._current is None:
            self._there.copy_(self._here)
        else:
            upload(*self._words)

    def download(self) -> None:
        """On the current stream; the host's side can be read, and written, once that copy is done."""
        if self._current is None:
            self._here.copy_(self._there)
        else:  # torch's own copy takes the host longer to launch
            self._down.launch(self._current.address)
