"""The table of a device's figures: each row is a command, and what was measured is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specstream import cli
from specstream.models.presets import PRESETS, preset_config
from specstream.options import SELF
from tests.helpers import script


@pytest.fixture(scope="module")
def gpu_table() -> ModuleType:
    return script("gpu_table")


def test_every_row_of_the_table_is_a_command(gpu_table: ModuleType) -> None:
    for row in gpu_table.ROWS.values():
        first, *rest = row.command.split()
        if first == "attention_kernels.py":
            pytest.importorskip("triton")
        if first.endswith(".py"):
            asked = script(first.removesuffix(".py")).parser().parse_args(rest)
        else:
            asked = cli.make_parser().parse_args(["bench", first, *rest])
        for name in (getattr(asked, role, "none") for role in ("target", "draft")):
            if isinstance(name, str) and name not in ("none", SELF):
                assert name in PRESETS
                assert preset_config(name, asked.context)


def test_the_table_keeps_what_was_measured(
    gpu_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ran = tmp_path / "results" / "gpu.json", list[str]()

    def measure(self: Any, command: str) -> dict[str, Any]:
        ran.append(command)
        return {"link_utilization": 0.985, "launch_ms": 2.0, "round_ms": 5.0} if len(ran) != 2 else {"error": "odd"}

    def table(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpu_table.py", "--file", str(file), *arguments])
        gpu_table.main()
        return capsys.readouterr().out.partition("| row |")[2]

    monkeypatch.setattr(gpu_table.Runner, "measure", measure)
    shown = table("--rows", "a-1x32K,a-8x16K,e-1x32K")
    assert len(ran) == 2  # e-1x32K has the run of a-1x32K
    assert "| a-1x32K | link_utilization | 0.985 | >= 0.98 | yes |" in shown
    assert "| a-8x16K | link_utilization | failed: odd | >= 0.99 |  |" in shown
    assert "| e-1x32K | launch_ms | 2 | <= 1 | no |" in shown
    assert "| a-8x16K | link_utilization | 0.985 | >= 0.99 | no |" in table("--rows", "a-8x16K,a-1x32K")
    assert len(ran) == 3  # what failed, and nothing else, was run again
    shown = table("--rows", "n", "--limit-seconds", "-1")
    assert "| n-logits | streamed_difference | not run | none |  |" in shown
    assert len(ran) == 3
    table("--rows", "e-1x32K", "--redo")
    assert len(ran) == 4
    with pytest.raises(SystemExit, match="no row 'z'"):
        table("--rows", "a,z")


def test_a_script_is_a_command_too(
    gpu_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fine.py").write_text("import sys; open(sys.argv[-1], 'w').write('{\"x\": 1}')")
    (tmp_path / "bad.py").write_text("raise SystemExit('no device')")
    monkeypatch.setattr(gpu_table, "FOLDER", tmp_path)
    assert gpu_table.Runner().measure("fine.py --context 5") == {"x": 1}
    assert gpu_table.Runner().measure("bad.py") == {"error": "no device"}


def test_commands_of_a_target_alone_run_in_this_process(gpu_table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_table, "in_own_process", lambda command: {"apart": command})
    runner = gpu_table.Runner()
    shape = "--target tiny --dtype float32 --context 128 --chunk-tokens 16"
    assert runner.measure(f"round {shape} --rounds 2")["streamed_bytes_per_round"] > 0
    assert runner.measure(f"generate {shape} --draft none --new-tokens 9 --skip-prefill")["decode_rounds"] == 5
    assert runner.measure(f"round {shape} --queries 1000")["error"].startswith("UsageError: --queries 1000: at most")
    for more in ("--draft tiny", "--draft none --memory-cap 1GiB"):
        assert runner.measure(f"generate {shape} {more}") == {"apart": f"generate {shape} {more}"}
