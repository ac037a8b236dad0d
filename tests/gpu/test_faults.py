"""Copies, kernels and memory that fail, and interrupts: a clear error, no hang, and the same tokens afterwards."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from specstream import pinned
from specstream.device_copy import Transfer
from specstream.errors import EngineClosed, OutOfBudget
from specstream.graph import Piece
from specstream.kernel_attention import KernelAttention
from tests.cuda_cases import (
    DTYPES,
    PROMPTS,
    Strike,
    before,
    cuda_engine,
    cuda_executor,
    expected_tokens,
    tokens_of,
)
from tests.helpers import check_free, prompt, step_to_end

both = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
errors = pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])


@both
@errors
@pytest.mark.parametrize(("owner", "name"), [(Transfer, "launch"), (Piece, "run")])
def test_what_fails_in_a_round_can_be_tried_again(
    owner: type, name: str, error: type[BaseException], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every so many calls one raises, wherever in a round that is; `step` raises it, and is called again."""
    expected = expected_tokens(dtype)
    with cuda_engine(dtype, drafts=True) as engine:
        # About as many as a round has; replayed ones run no pieces, so that there are few.
        for every in (17, 23) if owner is Piece and dtype == torch.float32 else (41, 67):
            strike = Strike(error, every)
            with monkeypatch.context() as patch:
                before(patch, owner, name, strike)
                assert tokens_of(engine, error) == expected
            assert strike.strikes > 0
        assert tokens_of(engine) == expected


@errors
@pytest.mark.parametrize(
    ("owner", "name", "every"), [(Transfer, "launch", 37), (Piece, "run", 6), (KernelAttention, "attend", 37)]
)
def test_what_fails_while_a_round_is_captured_can_be_tried_again(
    owner: type, name: str, every: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32
    expected = expected_tokens(dtype)
    strike = Strike(error, every, only_captured=True)
    with cuda_engine(dtype, drafts=True) as engine:
        with monkeypatch.context() as patch:
            before(patch, owner, name, strike)
            for _ in range(3):
                assert tokens_of(engine, error) == expected
        assert strike.strikes > 0
        assert tokens_of(engine) == expected
        assert cuda_executor(engine)._graphs


def test_host_memory_that_is_not_pinned_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
            return 2

    with monkeypatch.context() as patch:
        patch.setattr(pinned, "_runtime", Refusing)
        engine = cuda_engine(torch.float32, drafts=True)  # which begins to pin
        for ids in PROMPTS:
            engine.submit(ids, max_new_tokens=40)
        for _ in range(2):
            with pytest.raises(OutOfBudget, match=r"the driver does not pin .* lower host_kv_budget"):
                engine.step()
    with engine:
        assert list(step_to_end(engine).values()) == expected_tokens(torch.float32)
        check_free(engine)


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, usual)


@both
def test_interrupts_at_random_moments(dtype: torch.dtype, alarm: None) -> None:
    chooser = random.Random(0)
    struck = 0
    with cuda_engine(dtype, drafts=True) as engine:
        assert tokens_of(engine) == expected_tokens(dtype)
        for attempt in range(40):
            gc.disable()  # an interrupt in a finaliser is not raised
            try:
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(0.001, 0.3))
                engine.generate([list(ids) for ids in PROMPTS], max_new_tokens=40)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                struck += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                gc.enable()
            if attempt % 10 == 9:
                assert not engine.has_unfinished
                assert tokens_of(engine) == expected_tokens(dtype)
    assert struck > 10


@pytest.mark.parametrize("in_use", [False, True])
def test_closing_releases_the_pinned_memory(in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    held: dict[int, int] = {}

    class Counting:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:  # noqa: N802
            held[address] = size
            return real.cudaHostRegister(address, size, flags)

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            del held[address]
            real.cudaHostUnregister(address)

    monkeypatch.setattr(pinned, "_runtime", Counting)
    engine = cuda_engine(torch.float32, drafts=True, max_model_len=8192)
    assert tokens_of(engine)
    engine.submit(prompt(3000), max_new_tokens=5000)
    while in_use and engine.metrics().generated_tokens < 100:
        engine.step()
    size = sum(held.values())
    assert size == engine._host.allocated_bytes > 16 << 20
    resident = psutil.Process().memory_info().rss
    engine.close()
    gc.collect()
    assert not held
    assert resident - psutil.Process().memory_info().rss > size // 2
    with pytest.raises(EngineClosed):
        engine.step()
    engine.close()
