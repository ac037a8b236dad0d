"""The bundled pair of tiny models: a target and a draft of one vocabulary, their text and their facts."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TARGET = FOLDER / "target"
DRAFT = FOLDER / "draft"
TEXT = FOLDER / "text"
ADVERTISED_LENGTHS = (1024, 2048, 4096, 8192, 16384)

__all__ = ["ADVERTISED_LENGTHS", "DRAFT", "FOLDER", "TARGET", "TEXT"]
