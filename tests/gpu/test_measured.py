"""A device measured for real: as fast as it is listed, and stored. Nothing else may use the device meanwhile."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from specstream import profile_cache, profiles
from specstream.measured import measure_profile
from specstream.profile_cache import cache_folder, measured_profile
from specstream.profiles import device_profile, find_profile

SECONDS = 5
MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unstored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are measured here, and their files are of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "measured_profile", measured_profile)
    monkeypatch.setattr(profile_cache, "_PROFILES", {})


def test_a_listed_device_is_as_fast_as_listed(device: torch.device) -> None:
    listed = find_profile(torch.cuda.get_device_name(device))
    assert listed is not None, "list the device, whose figures there is nothing to compare with: specstream/profiles.py"
    before = time.perf_counter()
    found = device_profile(device)
    seconds = time.perf_counter() - before
    print(f"\n{seconds:.2f} s: {asdict(found)}\nlisted: {asdict(listed)}")
    assert seconds < SECONDS
    assert found.name == listed.name
    assert found.title.startswith(f"{listed.name}, measured 2")
    assert found.host_to_device_bytes_per_us == pytest.approx(listed.host_to_device_bytes_per_us, rel=0.15)
    assert found.device_to_host_bytes_per_us == pytest.approx(listed.device_to_host_bytes_per_us, rel=0.15)
    assert found.memory_bytes_per_us == pytest.approx(listed.memory_bytes_per_us, rel=0.25)
    assert found.flops_per_us == pytest.approx(listed.flops_per_us, rel=0.25)
    assert listed.launch_us / 2 < found.launch_us < 2 * listed.launch_us
    assert found.device_memory_bytes == pytest.approx(listed.device_memory_bytes, rel=0.1)


def test_another_process_reads_what_the_first_has_stored(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    first = device_profile(device)
    (file,) = cache_folder().iterdir()
    monkeypatch.setattr(profile_cache, "_PROFILES", {})
    monkeypatch.setattr(profile_cache, "measure_profile", lambda device: pytest.fail("measured again"))
    assert device_profile(device) == first
    assert list(cache_folder().iterdir()) == [file]


def test_measuring_leaves_no_memory_behind_and_random_numbers_alone(device: torch.device) -> None:
    measure_profile(device)  # libraries keep work memory of their own
    torch.cuda.empty_cache()
    torch.manual_seed(3)
    expected = torch.rand(3, device=device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.manual_seed(3)
    measure_profile(device)
    assert torch.equal(torch.rand(3, device=device), expected)
    assert torch.cuda.memory_allocated(device) <= allocated
    assert torch.cuda.memory_reserved(device) <= reserved + 2 * MIB  # of which the test's own numbers have some


def test_with_little_memory_smaller_copies_are_measured(device: torch.device) -> None:
    usual = measure_profile(device)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 640 * MIB) / total, device)
    try:
        found = measure_profile(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert found.memory_bytes_per_us == pytest.approx(usual.memory_bytes_per_us, rel=0.25)
    assert found.host_to_device_bytes_per_us == pytest.approx(usual.host_to_device_bytes_per_us, rel=0.15)
