"""Measured profiles in the user's cache folder: stored, read again, and what is done where that goes wrong."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstream import profile_cache, profiles
from specstream.cost import DeviceProfile
from specstream.errors import SpecStreamWarning
from specstream.profile_cache import cache_folder, measured_profile, profile_file, read_profile, store_profile
from specstream.profiles import H200, device_profile

CUDA = torch.device("cuda", 0)
MEASURED = replace(
    H200, name="NVIDIA T4", torch_names=("NVIDIA T4",), source="copies", measured_on="2026-01-02 03:04 UTC"
)


@dataclass
class Machine:
    """A machine with a CUDA device, as far as it is asked."""

    properties: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="NVIDIA T4", uuid="GPU-1"))
    driver: Path = field(default_factory=Path)
    versions: dict[str, str] = field(default_factory=lambda: {"specstream": "0.1.0"})
    link: float = 12_000.0
    """What measuring finds, in bytes a microsecond."""
    error: Exception | None = None
    measured: int = 0
    """How often."""

    def measure(self, device: torch.device) -> DeviceProfile:
        self.measured += 1
        if self.error is not None:
            raise self.error
        return replace(MEASURED, host_to_device_bytes_per_us=self.link)

    def found(self) -> float:
        """What a new process plans with."""
        profile_cache._PROFILES.clear()
        return device_profile(CUDA).host_to_device_bytes_per_us


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(driver=tmp_path / "driver")
    made.driver.write_text("580.1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made.properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: made.properties.name)
    monkeypatch.setattr(profile_cache, "DRIVER_VERSION", made.driver)
    monkeypatch.setattr(profile_cache, "version", made.versions.__getitem__)
    monkeypatch.setattr(profile_cache, "measure_profile", made.measure)
    monkeypatch.setattr(profile_cache, "_PROFILES", {})
    monkeypatch.setattr(profiles, "measured_profile", measured_profile)
    return made


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_no_test_writes_to_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert cache_folder().is_relative_to(tmp_path_factory.getbasetemp())


def test_a_device_is_measured_once_and_its_file_read_afterwards(machine: Machine) -> None:
    assert machine.found() == 12_000
    machine.link = 9000
    assert machine.found() == 12_000
    assert machine.measured == 1
    (name,) = files(cache_folder())
    assert name == f"NVIDIA-T4_GPU-1_driver-580.1_torch-{torch.__version__}_specstream-0.1.0.json"


def test_a_process_keeps_what_it_began_with(machine: Machine) -> None:
    first = device_profile(CUDA)
    store_profile(replace(MEASURED, host_to_device_bytes_per_us=7000.0), profile_file(CUDA))
    assert device_profile(CUDA) is measured_profile(CUDA) is first
    assert machine.found() == 7000


@pytest.mark.parametrize("change", ["name", "uuid", "driver", "torch", "specstream"])
def test_another_device_driver_or_version_has_a_file_of_its_own(
    machine: Machine, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.found() == 12_000
    machine.link = 9000
    if change in ("name", "uuid"):
        setattr(machine.properties, change, "NVIDIA T40")
    elif change == "driver":
        machine.driver.write_text("581.0\n")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "3.0.0+cu140")
    else:
        machine.versions["specstream"] = "0.2.0"
    assert machine.found() == 9000
    assert len(files(cache_folder())) == 2


def test_what_is_stored_is_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "profile.json"
    store_profile(MEASURED, file)
    assert read_profile(file) == MEASURED
    assert read_profile(tmp_path / "none.json") is None


CORRUPT: dict[str, Callable[[dict[str, Any]], object]] = {
    "a list": lambda values: [values],
    "without a field": lambda values: {name: value for name, value in values.items() if name != "launch_us"},
    "with one more": lambda values: values | {"more": 1},
    "zero": lambda values: values | {"launch_us": 0},
    "negative": lambda values: values | {"memory_bytes_per_us": -4e6},
    "NaN": lambda values: values | {"flops_per_us": float("nan")},
    "absurd": lambda values: values | {"device_to_host_bytes_per_us": 1e300},
    "a text": lambda values: values | {"host_to_device_bytes_per_us": "fast"},
    "no memory": lambda values: values | {"device_memory_bytes": None},
    "no text": lambda values: values | {"source": 3},
    "no date": lambda values: values | {"measured_on": None},
    "no names": lambda values: values | {"torch_names": 3},
}
NO_JSON = {"cut off": b'{"name": "h2', "empty": b"", "no UTF-8": b"\xff\xfe", "nested too deep": b"[" * 200_000}


@pytest.mark.parametrize("how", [*CORRUPT, *NO_JSON])
def test_a_file_that_holds_no_profile_is_named_and_written_anew(machine: Machine, how: str) -> None:
    file = profile_file(CUDA)
    store_profile(MEASURED, file)
    if how in CORRUPT:
        file.write_text(json.dumps(CORRUPT[how](json.loads(file.read_text()))))
    else:
        file.write_bytes(NO_JSON[how])
    with pytest.raises(ValueError):
        read_profile(file)
    with pytest.warns(SpecStreamWarning, match=r"holds no profile of a device: .*measured again") as seen:
        assert machine.found() == 12_000
    assert str(file) in str(seen[0].message)
    assert Path(seen[0].filename).name == Path(__file__).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine.found() == 12_000
    assert machine.measured == 1


def test_a_folder_that_cannot_be_written_to_is_named_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.driver))  # a file
    with pytest.warns(SpecStreamWarning, match="cannot be stored .*: set XDG_CACHE_HOME") as seen:
        assert device_profile(CUDA).host_to_device_bytes_per_us == 12_000
    assert str(machine.driver) in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_profile(CUDA).host_to_device_bytes_per_us == 12_000
    assert machine.measured == 1


@pytest.mark.parametrize("text", ["", "some/where", "~/cache"])
def test_only_an_absolute_folder_is_taken(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", text)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specstream"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="no home folder"):
        store_profile(MEASURED, Path("~/.cache/profile.json"))  # what is left where the system knows no home folder
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("full"), RuntimeError("CUDA error"), ValueError("launch_us is 0"), OSError()],
    ids=str,
)
def test_a_device_that_cannot_be_measured_is_planned_for_by_listed_figures(machine: Machine, error: Exception) -> None:
    machine.error = error
    with pytest.warns(SpecStreamWarning, match=r"cuda:0 could not be measured \(.+\): this process predicts by listed"):
        assert device_profile(CUDA) is H200
    machine.error = None
    assert device_profile(CUDA) is H200  # an engine may be at work now
    assert machine.measured == 1
    assert not cache_folder().exists()
    assert machine.found() == 12_000


def test_a_listed_device_that_cannot_be_measured_has_its_own_listed_figures(machine: Machine) -> None:
    machine.error, machine.properties.name = RuntimeError("CUDA error"), "NVIDIA L40S"
    with pytest.warns(SpecStreamWarning):
        assert device_profile(CUDA).title == "l40s"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    store_profile(MEASURED, file)

    def half(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as opened:
            opened.write(text[:100])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="the disk is full"):
            store_profile(replace(MEASURED, name="other"), file)
    assert read_profile(file) == MEASURED
    assert files(tmp_path) == [file.name]


def test_a_driver_that_the_system_does_not_name_is_known_by_its_cuda_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.driver.unlink()
    runtime = SimpleNamespace(cudaDriverGetVersion=lambda: (0, 13_000))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=runtime))
    assert "_driver-cuda-13000_" in profile_file(CUDA).name
