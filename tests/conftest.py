"""What holds for every test: threads, the Triton interpreter, Hypothesis profiles, caches, what needs a GPU."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the working directory there: its kernels/ would pass for the PyPI package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

HAS_CUDA = torch.cuda.is_available()

# Triton reads this when it is first imported; transformers and torch.compile do that.
if not HAS_CUDA and importlib.util.find_spec("triton") is not None:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before conftest.py could choose its interpreter")
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Nothing is ever fetched: the tests use what the checkout holds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

torch.set_num_threads(1)

# pytest attaches its log capture to every logger that does not propagate. On this one torch would then write
# a full trace of each compilation, which takes longer than the compilation.
logging.getLogger("torch.__trace").propagate = True

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("default"), derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is under tests/gpu, and skips what is marked `gpu` where there is no CUDA device.

    With one, kernels are compiled for it: what is marked `interpreter` is skipped, and tests/gpu has its counterpart.
    """
    gpu = Path(__file__).parent / "gpu"
    for item in items:
        if gpu in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if not HAS_CUDA and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if HAS_CUDA and item.get_closest_marker("interpreter") is not None:
            item.add_marker(pytest.mark.skip(reason="for Triton's interpreter; here kernels are compiled (tests/gpu)"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, and no program that one starts, writes to the user's cache.

    In the tests' own process plans are by listed figures: the same however busy a device is with other tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("specstream.profiles.measured_profile", lambda device: None)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT
