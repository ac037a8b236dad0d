"""The profile of a device of this machine, by measuring it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial

import torch

from specstream.cost import DeviceProfile
from specstream.rates import (
    DEVICE_COPY_BYTES,
    LINK_COPY_BYTES,
    MATRIX_ROWS,
    device_copy_bandwidth,
    launch_seconds,
    link_bandwidth,
    product_rate,
)

PROMPT_SHARE = 0.6
"""What a prompt gets of the rate of a large product alone: 470 TFLOP/s on an H200 (`profiles.TENSOR_SHARE`), where such
products run at about 790 (read, not measured by a command of this repository). Other devices are taken to get the same
share."""
LIMITS = {
    "device_memory_bytes": (1e6, 1e15),
    "host_to_device_bytes_per_us": (1e2, 1e7),
    "device_to_host_bytes_per_us": (1e2, 1e7),
    "memory_bytes_per_us": (1e3, 1e9),
    "flops_per_us": (1e3, 1e12),
    "launch_us": (0.01, 1e4),
}
"""Least and most of each figure, far beyond those of any device: what is not between them is a mistake."""


def measure_profile(device: torch.device) -> DeviceProfile:
    """Measures an idle device; takes a few seconds at most, and up to 2 GiB of its memory, less where there is less.

    Figures have two digits: predictions are no better, and a device that is measured again is mostly found the same.

    Raises:
        RuntimeError: of torch's; memory that does not even suffice for small copies, for example.
        ValueError: a figure that no device has.
    """
    kind, dtype = device.type, _product_dtype(device)
    profile = DeviceProfile(
        name=_name(device),
        torch_names=(_name(device),),
        device_memory_bytes=torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else None,
        host_to_device_bytes_per_us=_rate(partial(link_bandwidth, device), LINK_COPY_BYTES[kind]),
        device_to_host_bytes_per_us=_rate(partial(link_bandwidth, device, to_host=True), LINK_COPY_BYTES[kind]),
        memory_bytes_per_us=_rate(partial(device_copy_bandwidth, device), DEVICE_COPY_BYTES[kind]),
        flops_per_us=_rate(partial(product_rate, device, dtype), MATRIX_ROWS[kind], share=PROMPT_SHARE),
        launch_us=_two_digits(1e6 * launch_seconds(device, dtype)),
        source=f"large copies, {PROMPT_SHARE} x the rate of large products in {str(dtype).removeprefix('torch.')}, and "
        f"norms in a graph, on {_name(device)} with torch {torch.__version__}",
        measured_on=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    if kind == "cuda":
        torch.cuda.empty_cache()
        check_figures(asdict(profile))
    return profile


def check_figures(values: Mapping[str, object]) -> None:
    """Looks at the figures among the fields of a CUDA device's profile.

    Raises:
        ValueError: one is none that a device can have; NaN and infinity are none.
    """
    for name, (least, most) in LIMITS.items():
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}, not a number from {least:g} to {most:g}")


def _rate(measure: Callable[[int], float], size: int, share: float = 1.0) -> float:
    """A share of what is measured with such a size, a microsecond; where there is no room, with half or a quarter."""
    for smaller in (size, size // 2):
        with suppress(torch.OutOfMemoryError):
            return _two_digits(share * measure(smaller) / 1e6)
    return _two_digits(share * measure(size // 4) / 1e6)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _product_dtype(device: torch.device) -> torch.dtype:
    """What products are measured in: half precision, in which a CPU is slow."""
    if device.type == "cpu":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
