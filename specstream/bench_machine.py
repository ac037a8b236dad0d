"""What benchmarks need of the machine itself: a device by its name, memory caps and peaks, names and versions."""

from __future__ import annotations

import gc
import platform
from importlib.metadata import version
from typing import Any

import torch

from specstream.errors import InvalidOption
from specstream.options import parse_size


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is the first CUDA device if there is one, else the CPU.

    Raises:
        InvalidOption: no such device here.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda", 0) if has_cuda else torch.device("cpu")
    allowed = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if has_cuda else []
    choices = ("auto", "cpu", *(("cuda", *allowed) if has_cuda else ()))
    if name not in choices:
        raise InvalidOption("device", name, " or ".join(choices))
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def cap_memory(device: torch.device, cap: str | None) -> None:
    """From now on tensors are refused more than so many bytes of the device; None: more than it has.

    Raises:
        InvalidOption: the device is a CPU, or the cap no size.
    """
    if cap is None:
        return
    size = parse_size("memory_cap", cap)
    if device.type == "cpu":
        raise InvalidOption("memory_cap", cap, "none on a CPU")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors on the device took at a time since `reset_peak_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def machine(device: torch.device) -> dict[str, Any]:
    """The machine, for a report."""
    host = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "host": host, "cuda": torch.version.cuda}
    return {"device": platform.processor() or platform.machine(), "host": host, "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("specstream", "torch", "transformers")}


def give_memory_back() -> None:
    """Frees what models and engines that are gone have left, on a device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
