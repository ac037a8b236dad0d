"""`specstream bench device`: on a CPU for real, on a CUDA device with what is measured given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specstream import bench_device, cli, measured, rates
from specstream.cost import DeviceProfile
from specstream.profile_cache import cache_folder, read_profile
from specstream.profiles import H200

CUDA = torch.device("cuda", 0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"LINK_COPY_BYTES": 1 << 20, "DEVICE_COPY_BYTES": 1 << 20, "MATRIX_ROWS": 64}.items():
        monkeypatch.setattr(measured, name, {"cpu": size})
    monkeypatch.setattr(rates, "LAUNCHES", 10)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


def of_cuda(monkeypatch: pytest.MonkeyPatch, torch_name: str) -> DeviceProfile:
    """Makes the command find a CUDA device, and measure this of it."""
    found = replace(
        H200, name=torch_name, torch_names=(torch_name,), launch_us=4.0, source="copies", measured_on="2026-01-02"
    )
    monkeypatch.setattr(bench_device, "choose_device", lambda name: CUDA)
    monkeypatch.setattr(bench_device, "measure_profile", lambda device: found)
    monkeypatch.setattr(bench_device, "profile_file", lambda device: cache_folder() / "device.json")
    monkeypatch.setattr(bench_device, "machine", lambda device: {"device": torch_name})
    return found


@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured_and_nothing_stored(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert cli.main(["bench", "device", "--device", "cpu", "--json", str(file)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "(listed: 5.0 GB/s)" in shown.out
    assert "(listed: takes no time)" in shown.out
    assert "nothing: plans on a CPU are by the listed figures" in shown.out
    figures = json.loads(file.read_text())
    assert figures["host_to_device_bytes_per_us"] > 0
    assert figures["launch_us"] > 0
    assert figures["listed"] == "cpu"
    assert figures["stored"] is None
    assert not folder.exists()


def test_a_listed_cuda_device_is_shown_beside_what_is_listed_and_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of_cuda(monkeypatch, "NVIDIA H200")
    assert cli.main(["bench", "device"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200, measured 2026-01-02" in shown
    for row in ("55.1 GB/s (listed: 55.1 GB/s)", "470 TFLOP/s (listed: 470 TFLOP/s)", "4.0 us (listed: 5.0 us)"):
        assert row in shown
    assert read_profile(folder / "device.json") == replace(found, name="h200")


def test_an_unlisted_cuda_device_is_shown_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of_cuda(monkeypatch, "NVIDIA T4")
    assert cli.main(["bench", "device", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["listed"] is None
    assert figures["stored"] == str(folder / "device.json")
    assert not any("(listed" in text for text in bench_device.table_rows(figures).values())
    assert read_profile(folder / "device.json") == found


def test_a_folder_that_cannot_be_written_to_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    of_cuda(monkeypatch, "NVIDIA T4")
    assert cli.main(["bench", "device"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specstream: error: the figures cannot be stored: ")
    assert shown.err.endswith("; set XDG_CACHE_HOME to a folder that can be written to\n")


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "device", "--device", "tpu"]) == 2
    assert "--device: got 'tpu'; allowed: auto" in capsys.readouterr().err
