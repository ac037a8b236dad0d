"""Profiles that are measured: on a CPU as far as it goes, and what is done where memory is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch

from specstream import measured, rates
from specstream.cost import DeviceProfile
from specstream.measured import LIMITS, check_figures, measure_profile
from specstream.profiles import CPU_PROFILE, H200, PROFILES, device_profile, with_listed_name
from specstream.rates import PLACES, best_seconds, device_copy_bandwidth, link_bandwidth

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"LINK_COPY_BYTES": 1 << 20, "DEVICE_COPY_BYTES": 1 << 20, "MATRIX_ROWS": 64}.items():
        monkeypatch.setattr(measured, name, {"cpu": size})
    monkeypatch.setattr(rates, "LAUNCHES", 10)


@pytest.mark.usefixtures("small")
def test_every_figure_is_measured_and_has_two_digits() -> None:
    profile = measure_profile(CPU)
    for name in LIMITS.keys() - {"device_memory_bytes"}:
        value = getattr(profile, name)
        assert value > 0
        assert value == float(f"{value:.2g}")
    assert profile.device_memory_bytes is None
    assert profile.measured_on is not None
    assert profile.title == f"{profile.name}, measured {profile.measured_on}"
    assert "float32" in profile.source
    assert torch.__version__ in profile.source


@pytest.mark.usefixtures("small")
def test_measuring_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    measure_profile(CPU)
    assert torch.equal(torch.rand(3), expected)


def test_the_shortest_of_several_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([at for start in range(0, 100, 10) for at in (start, start + (2 if start == 50 else 7))])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert best_seconds(lambda: None, CPU) == 2


def test_a_copy_in_memory_counts_reads_and_writes_and_one_on_the_link_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[float, float]] = []

    def one_second(work: Callable[[], torch.Tensor], device: torch.device) -> float:
        copied.append((work().sum().item(), device.type == "cpu"))
        return 1.0

    monkeypatch.setattr(rates, "best_seconds", one_second)
    assert device_copy_bandwidth(CPU, 1000) == 2000
    assert link_bandwidth(CPU, 1000) == link_bandwidth(CPU, 1000, to_host=True) == 1000
    assert copied == [(0, True)] * (1 + 2 * PLACES)


@pytest.mark.parametrize(("room", "tried"), [(100, [100]), (60, [100, 50]), (25, [100, 50, 25])])
def test_where_memory_is_short_less_is_copied(room: int, tried: list[int]) -> None:
    sizes: list[int] = []

    def measure(size: int) -> float:
        sizes.append(size)
        if size > room:
            raise torch.OutOfMemoryError("full")
        return size * 1e6

    assert measured._rate(measure, 100) == sizes[-1]
    assert sizes == tried


def test_where_nothing_fits_nothing_is_measured() -> None:
    def measure(size: int) -> float:
        raise torch.OutOfMemoryError(f"no room for {size}")

    with pytest.raises(torch.OutOfMemoryError, match="no room for 25"):
        measured._rate(measure, 100)


@pytest.mark.parametrize("profile", [p for p in PROFILES if p is not CPU_PROFILE], ids=lambda profile: profile.name)
def test_the_figures_of_real_devices_are_far_within_the_limits(profile: DeviceProfile) -> None:
    check_figures(asdict(profile))
    for name, (least, most) in LIMITS.items():
        assert 10 * least < getattr(profile, name) < most / 10


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e18, True, "55000", None, [1]], ids=str)
def test_figures_that_no_device_has_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*, not a number from "):
        check_figures(asdict(H200) | {name: value})


def test_a_measured_profile_has_the_short_name_of_a_listed_device() -> None:
    found = replace(H200, name="NVIDIA L40S", measured_on="2026-01-02 03:04 UTC")
    assert with_listed_name(found).title == "l40s, measured 2026-01-02 03:04 UTC"
    assert with_listed_name(found) == replace(found, name="l40s")
    unlisted = replace(found, name="NVIDIA T4")
    assert with_listed_name(unlisted) is unlisted
    assert H200.title == "h200"


def test_a_cpus_figures_are_fixed() -> None:
    assert device_profile(CPU) is CPU_PROFILE
