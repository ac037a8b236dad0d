"""Measured profiles, kept in the user's cache folder: a file for each device, driver and versions."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import torch

from specstream.caller import warn_caller
from specstream.cost import DeviceProfile
from specstream.errors import shortened
from specstream.measured import check_figures, measure_profile

DRIVER_VERSION, PROCESSORS = Path("/sys/module/nvidia/version"), Path("/proc/cpuinfo")
"""Where Linux tells them."""
WAY_OUT = "set XDG_CACHE_HOME to a folder that can be written to"
TEXTS = ("name", "source", "measured_on")

_PROFILES: dict[Path, DeviceProfile | None] = {}
"""What this process plans with, by file; None: the device could not be measured. A process measures a device at most
once, before its first engine there is made: so none of its own is at work then, and all are planned alike."""
_ASKING = Lock()
"""Held while a device is measured, which is to be idle."""


def measured_profile(device: torch.device) -> DeviceProfile | None:
    """The profile of a CUDA device as stored; measured and stored if it is not.

    What else is at work on the device meanwhile cannot be known, and shows in the figures: `specstream bench device`
    measures it again.

    Returns:
        None, after a warning, if the device cannot be measured.
    """
    with _ASKING:
        file = profile_file(device)
        if file not in _PROFILES:
            _PROFILES[file] = _stored_or_measured(device, file)
        return _PROFILES[file]


def profile_file(device: torch.device) -> Path:
    """The file of a CUDA device; after an update, or for a device of the same kind, it is another one."""
    found = environment(device)
    parts = [found.pop("device"), found.pop("number"), *(f"{name}-{value}" for name, value in found.items())]
    return cache_folder() / ("_".join(re.sub(r"[^\w.+]+", "-", part) for part in parts) + ".json")


def environment(device: torch.device) -> dict[str, str]:
    """On what the speed of a device of this machine depends, beside models and options."""
    versions = {"torch": str(torch.__version__), "specstream": version("specstream")}
    if device.type != "cuda":
        return {"device": _processor(), "number": f"{os.cpu_count()} cores"} | versions
    properties = torch.cuda.get_device_properties(device)
    # no other device has its uuid, on another host that shares the folder either
    named = {"device": properties.name, "number": str(properties.uuid)}
    return named | {"driver": _driver_version()} | versions


def _processor() -> str:
    """Its model, as far as the system tells."""
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", PROCESSORS.read_text("utf-8"), re.MULTILINE)
        if found is not None:
            return found[1]
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where a user's programs keep what can be made again; no absolute path if the system does not know the user."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))  # counts only if it is absolute, by its specification
    return (chosen if chosen.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "specstream"


def read_profile(file: Path) -> DeviceProfile | None:
    """What `store_profile` has written; None if there is no such file, or none that may be read.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        text = file.read_text("utf-8")
    except OSError:
        return None
    try:
        values = json.loads(text)
    except RecursionError as error:  # of what is nested too deep
        raise ValueError(str(error)) from error
    names = {field.name for field in fields(DeviceProfile)}
    if not isinstance(values, dict) or values.keys() != names:
        raise ValueError(f"it does not have the fields {', '.join(sorted(names))}, and no others")
    for name in TEXTS:
        if not isinstance(values[name], str):
            raise ValueError(f"{name} is {values[name]!r}, not a text")
    if not isinstance(values["torch_names"], list):
        raise ValueError(f"torch_names is {values['torch_names']!r}, not a list")
    check_figures(values)
    return DeviceProfile(**values | {"torch_names": tuple(values["torch_names"])})


def store_profile(profile: DeviceProfile, file: Path) -> None:
    """Writes the file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(json.dumps(asdict(profile), indent=2) + "\n", file)


def write_whole(text: str, file: Path) -> None:
    """Writes a file of the cache, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    if not file.is_absolute():
        raise FileNotFoundError("no home folder is known")
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=file.stem, suffix=".tmp", dir=file.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        unfinished.write_text(text, "utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _stored_or_measured(device: torch.device, file: Path) -> DeviceProfile | None:
    try:
        stored = read_profile(file)
    except ValueError as error:
        warn_caller(f"{file} holds no profile of a device: {error}. The device is measured again")
        stored = None
    if stored is not None:
        return stored
    try:
        profile = measure_profile(device)
    except Exception as error:  # whatever it is: an engine can be made without
        reason = shortened(str(error)) or type(error).__name__
        warn_caller(f"{device} could not be measured ({reason}): this process predicts by listed figures")
        return None
    try:
        store_profile(profile, file)
    except OSError as error:
        warn_caller(f"what was measured of {device} cannot be stored ({error}), only used by this process: {WAY_OUT}")
    return profile


def _driver_version() -> str:
    """The driver's, or where the system does not tell, the CUDA version that it is for."""
    with suppress(OSError):
        return DRIVER_VERSION.read_text("utf-8").strip()
    from cuda.bindings import runtime  # which machines without a device need not have

    return f"cuda-{runtime.cudaDriverGetVersion()[1]}"
