"""Pages that show `specstream plan`: the commands run, and print what the pages show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from specstream import cli

PAGES = ("README.md", "docs/planning.md")
BLOCK = re.compile(r"^```\n\$ specstream (plan .*)\n((?:.*\n)*?)```$", re.MULTILINE)
FIGURE = re.compile(r"\d+\.\d+ (?:[KMGT]iB|ms)|\d{5,}")
WIDTH = 120
"""Columns of the terminal that the pages show."""
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = [(page, *found) for page in PAGES for found in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def test_both_pages_have_examples() -> None:
    assert {page for page, _, _ in EXAMPLES} == set(PAGES)
    devices = [command.split("--device ")[1].split()[0] for _, command, _ in EXAMPLES]
    assert {"rtx-4090", "h100"} <= set(devices)


@pytest.mark.parametrize(("page", "command", "shown"), EXAMPLES)
def test_a_command_prints_what_the_page_shows(
    page: str, command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of "..." stand for lines that are left out."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert cli.main(shlex.split(command)) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    parts = re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)
    assert re.fullmatch(r"(?:.*\n)+".join(re.escape(part) for part in parts), printed), f"{page} shows other figures"


def test_figures_in_the_text_are_those_that_are_shown() -> None:
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    outputs = "".join(shown for _, _, shown in EXAMPLES)
    told = FIGURE.findall(re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL))
    assert len(told) > 8
    assert [figure for figure in told if figure not in outputs] == []
