"""`specstream bench device`: measures a device anew, and stores what plans on it are predicted by."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import Any

from specstream.bench_machine import choose_device, machine, versions
from specstream.bench_report import Progress, report
from specstream.bench_setup import given_options
from specstream.cli import UsageError
from specstream.measured import measure_profile
from specstream.profile_cache import WAY_OUT, profile_file, store_profile
from specstream.profiles import CPU_PROFILE, find_profile, with_listed_name


def run(given: argparse.Namespace) -> int:
    """The command."""
    figures = measure(given, Progress())
    title = f"{figures['machine']['device']}, measured {figures['measured_on']}"
    report(title, table_rows(figures), figures, given.json)
    return 0


def measure(given: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Measures and returns the figures; those of a CUDA device are stored.

    Raises:
        UsageError: they cannot be.
    """
    device = choose_device(given.device)
    with progress.working(f"measuring {device}"):
        profile = with_listed_name(measure_profile(device))
    listed, file = (find_profile(profile.name), profile_file(device)) if device.type == "cuda" else (CPU_PROFILE, None)
    if file is not None:
        try:
            store_profile(profile, file)
        except OSError as error:
            raise UsageError(f"the figures cannot be stored: {error}; {WAY_OUT}") from error
    return {
        "benchmark": "device",
        "machine": machine(device),
        "versions": versions(),
        "options": given_options(given),
        **asdict(profile),
        "listed": listed.name if listed else None,
        "stored": str(file) if file else None,
    }


def table_rows(figures: dict[str, Any]) -> dict[str, str]:
    """What is shown of the figures, beside those of the listed profile if there is one."""
    rows = _rows(figures)
    if figures["listed"]:
        listed = find_profile(figures["listed"])
        assert listed is not None
        rows = {name: f"{rows[name]} (listed: {text})" for name, text in _rows(asdict(listed)).items()}
    stored = figures["stored"] or "nothing: plans on a CPU are by the listed figures, so that they are always the same"
    return rows | {"from": figures["source"], "stored": stored}


def _rows(profile: dict[str, Any]) -> dict[str, str]:
    to_device, to_host, memory = (
        f"{profile[f'{name}_bytes_per_us'] / 1e3:.1f} GB/s" for name in ("host_to_device", "device_to_host", "memory")
    )
    flops = profile["flops_per_us"]
    return {
        "link, to the device": to_device,
        "link, to the host": to_host,
        "memory": memory,
        "computing": "takes no time" if math.isinf(flops) else f"{flops / 1e6:.3g} TFLOP/s",
        "small kernel": f"{profile['launch_us']:.1f} us",
    }
