"""Tuned settings beside every setting of a grid."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from specstream import tuning
from specstream.engine import Engine
from specstream.models.load import load_model
from specstream.models.tiny import DRAFT, TARGET
from specstream.options import Options
from specstream.parts import make_parts
from specstream.trial import Stopwatch
from specstream.tuned_settings import TunedSettings
from tests.helpers import captured


def test_tuned_settings_are_as_fast_as_any_of_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bundled pair, by the processor's time: that of the clock depends on what else runs."""
    target, draft = (captured(load_model(folder)[0]) for folder in (TARGET, DRAFT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "Stopwatch", partial(Stopwatch, clock=time.process_time))
    monkeypatch.setattr(tuning, "give_memory_back", lambda: None)
    options = Options(max_model_len=1024, max_num_seqs=2, num_speculative_tokens="auto", gpu_kv_budget="4MiB")
    with Engine(make_parts(options, target, draft)) as engine:
        found = engine.tune(seconds=60)
    assert found.best is not None
    stopwatch = Stopwatch(options, target, draft, found.workload, clock=time.process_time)
    grid = [
        TunedSettings(chunk, group, 2, depth, "sequential") for chunk, group in ((16, 4), (64, 2)) for depth in (2, 8)
    ]
    rates = dict.fromkeys([found.best.settings, *grid], 0.0)
    for _ in range(3):
        for settings in rates:
            rates[settings] = max(rates[settings], stopwatch.rate(settings, 0.0))
    assert rates[found.best.settings] >= 0.97 * max(rates.values()), (found, rates)
