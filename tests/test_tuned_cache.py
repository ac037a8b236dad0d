"""Tuned settings in the user's cache folder: found again for engines like the one they are of, and for no others."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specstream import tuned_cache
from specstream.errors import SpecStreamWarning
from specstream.options import Options
from specstream.profile_cache import environment
from specstream.tuned_cache import read_tuned, store_tuned, stored_tuned, tuned_file
from specstream.tuned_settings import TunedSettings
from tests.helpers import captured, model

TUNED = TunedSettings(32, 4, 6, 8, "cohorts")
OPTIONS = Options(max_model_len=512, num_speculative_tokens="auto")
MODEL = captured(model("qwen3"))
OTHER = captured(model("qwen3", layers=1))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def store(**changes: Any) -> Path:
    file = tuned_file(OPTIONS, MODEL, OTHER)
    store_tuned(TUNED, 12.5, MODEL.spec, file)
    kept = json.loads(file.read_text())
    kept["settings"] |= changes
    file.write_text(json.dumps(kept))
    return file


def found(options: Options = OPTIONS) -> TunedSettings | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return stored_tuned(options, MODEL, OTHER)


def test_they_are_found_again() -> None:
    assert found() is None
    store()
    assert found() == TUNED
    assert found(Options(max_model_len=512, num_speculative_tokens="auto", debug=True)) == TUNED


def test_settings_of_lookahead_and_windows_are_found_again() -> None:
    options = Options(max_model_len=512, num_speculative_tokens="auto", draft_window="auto")
    for settings in (replace(TUNED, drafting="lookahead", lookahead_branches=8), replace(TUNED, draft_window=128)):
        store_tuned(settings, 1.0, MODEL.spec, tuned_file(options, MODEL, OTHER))
        assert found(options) == settings
        asked = settings.given_to(options)
        assert asked.lookahead_branches == (settings.lookahead_branches or "auto")
        assert asked.draft_window == settings.draft_window


@pytest.mark.parametrize(
    "other",
    [
        {"max_model_len": 513},
        {"max_num_seqs": 3},
        {"gpu_kv_budget": "4MiB"},
        {"draft_window": 64},
        {"chunk_tokens": 16},
        {"num_speculative_tokens": 8},
        {"drafting": "cohorts"},
        {"drafting": "lookahead", "lookahead_branches": 8},
        {"chunk_tokens": 32, "group_chunks": 4, "staging_slots": 2, "num_speculative_tokens": 3, "drafting": "off"},
    ],
    ids=str,
)
def test_others_do_not_find_them(other: dict[str, Any]) -> None:
    store()
    options: dict[str, Any] = {"max_model_len": 512, "num_speculative_tokens": "auto"}
    assert found(Options(**options | other)) is None
    for target, draft in ((MODEL, None), (MODEL, MODEL), (OTHER, OTHER), (OTHER, MODEL)):
        assert stored_tuned(OPTIONS, target, draft) is None


def test_a_size_is_the_same_however_it_is_written() -> None:
    texts = {tuned_file(Options(max_model_len=512, gpu_kv_budget=size), MODEL, None) for size in ("4MiB", 4 << 20)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ("{}", "KeyError"),
        ("[]", "TypeError"),
        ('{"settings": 3, "environment": {}}', "TypeError"),
        (json.dumps({"settings": asdict(TUNED) | {"more": 1}, "environment": {}}), "TypeError"),
    ],
    ids=["cut", "nested", "empty", "list", "number", "another version"],
)
def test_another_text_is_ignored_with_a_warning(text: str, reason: str) -> None:
    file = store()
    file.write_text(text)
    with pytest.warns(SpecStreamWarning, match=f"holds no tuned settings.*{reason}.*automatic ones are used"):
        assert read_tuned(MODEL.spec, file) is None


@pytest.mark.parametrize("data", [b"\xff\xfe", b""], ids=["no text", "nothing"])
def test_so_is_what_is_no_text(data: bytes) -> None:
    file = store()
    file.write_bytes(data)
    with pytest.warns(SpecStreamWarning, match="holds no tuned settings"):
        assert read_tuned(MODEL.spec, file) is None


def test_so_is_a_folder_in_its_place() -> None:
    file = store()
    file.unlink()
    file.mkdir()
    with pytest.warns(SpecStreamWarning, match="tuned settings cannot be read .*: automatic ones are used"):
        assert read_tuned(MODEL.spec, file) is None


@pytest.mark.parametrize(
    "change",
    [{"chunk_tokens": 0}, {"chunk_tokens": "auto"}, {"staging_slots": "4"}, {"drafting": "auto"}],
    ids=str,
)
def test_so_are_values_that_no_option_can_have(change: dict[str, Any]) -> None:
    file = store(**change)
    with pytest.warns(SpecStreamWarning, match=f"holds no tuned settings.*{next(iter(change))}"):
        assert read_tuned(MODEL.spec, file) is None


def test_they_are_not_used_after_a_change_and_it_is_said_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    file = store()
    before = environment(torch.device("cpu"))
    monkeypatch.setattr(tuned_cache, "environment", lambda device: before | {"torch": "9.9.9"})
    said = r"torch was .*, is 9\.9\.9.*automatic ones are used. Tune again"
    with pytest.warns(SpecStreamWarning, match=said) as seen:
        assert stored_tuned(OPTIONS, MODEL, OTHER) is None
    assert str(file) in str(seen[0].message)
