"""Pages for people: what they link to is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

LINK = re.compile(r"\]\(([^)\s]+)\)")
MOST_BYTES = 250_000
"""Of a picture, so that a page opens quickly."""


def pages(root: Path) -> list[Path]:
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def test_relative_links_lead_to_files(root: Path) -> None:
    links = [(page, link) for page in pages(root) for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [f"{page.name}: {link}" for page, link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []
    assert len(links) > 8


def test_pictures_are_shown_and_small(root: Path) -> None:
    pictures = {path.resolve() for path in (root / "docs" / "pictures").iterdir()}
    shown = {(page.parent / link).resolve() for page in pages(root) for link in LINK.findall(page.read_text())}
    assert pictures <= shown
    assert len(pictures) > 2
    assert [path.name for path in pictures if path.stat().st_size > MOST_BYTES] == []


@pytest.mark.parametrize("name", ["duration_ms", "bubble_fill", "mean_acceptance_length", "streamed_bytes"])
def test_the_page_about_traces_names_the_scalars(root: Path, name: str) -> None:
    assert f"`round/{name}`" in (root / "docs" / "traces.md").read_text()


def test_the_planned_picture_can_be_made_without_weights(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    script = runpy.run_path(str(root / "docs" / "pictures.py"))
    model = script["without_weights"](script["meta_model"]("qwen3-8b"))
    assert model.read_bytes == pytest.approx(15.14e9, rel=1e-3)  # Qwen3-8B's, without its embedding table
    assert len(model.pieces) == model.spec.num_layers + 1 == 37
    script["planned_picture"](tmp_path / "planned.png")
    assert 20_000 < (tmp_path / "planned.png").stat().st_size < MOST_BYTES
