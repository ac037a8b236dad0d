"""Small engines on a CUDA device, and lanes of theirs that are slow or deaf on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from specstream.cuda_executor import CudaExecutor
from specstream.device_copy import Transfer
from specstream.engine import Engine
from specstream.graph import Piece
from specstream.kernel_attention import KernelAttention
from specstream.prompt_attention import PromptAttention
from specstream.round_plan import Lane
from tests.architectures import build
from tests.helpers import Request, check_free, make_engine, prompt, reference

DTYPES = {"interpreted": torch.float64, "replayed": torch.float32}
"""In float64 no round is computed by the kernels, so none is captured."""
NEAR_TIE = 1e-4
"""Two best logits that are closer may come out either way; in float64 too, where norms are computed in float32."""
MILLISECOND = 1_800_000
"""Of `torch.cuda._sleep`, in cycles; about."""
OPTIONS: dict[str, Any] = {
    "chunk_tokens": 16,
    "group_chunks": 2,
    "staging_slots": 2,
    "max_model_len": 640,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "debug": True,  # buffers that nobody may read are NaN
}


@cache
def host_model(dtype: torch.dtype) -> nn.Module:
    """Three random layers with heads that the kernels take."""
    return build("qwen3", dtype, 0, eos_token_id=None, head_dim=64)


@cache
def device_model(dtype: torch.dtype) -> nn.Module:
    """The same on the device."""
    return build("qwen3", dtype, 0, eos_token_id=None, head_dim=64).to("cuda")


def cuda_engine(dtype: torch.dtype, drafts: bool = False, **changes: Any) -> Engine:
    """An engine without Inductor, which only takes time here; its own draft if it drafts.

    On the device it has room for two tails and three resident chunks.
    """
    target, budget = device_model(dtype), dtype.itemsize << 17
    return make_engine(target, target if drafts else None, **OPTIONS | {"gpu_kv_budget": budget} | changes)


def cuda_executor(engine: Engine) -> CudaExecutor:
    assert isinstance(engine._executor, CudaExecutor)
    return engine._executor


def assert_the_targets(dtype: torch.dtype, *requests: Request) -> None:
    """Each request's tokens are those of the target alone on the CPU, up to a near-tie if there is one."""
    for request in requests:
        alone = reference(host_model(dtype), request.prompt, request.max_new_tokens)
        for index, pair in enumerate(zip(request.tokens, alone.tokens, strict=True)):
            if pair[0] != pair[1]:
                assert alone.gaps[index] < NEAR_TIE, f"token {index} is {pair[0]}, not {pair[1]}"
                break


# Slow lanes. Sleeps are kernels: they become a part of what is captured.

Before = Callable[..., None]


def before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, action: Before) -> None:
    """Calls `action` with a method's arguments before each call of it."""
    method = getattr(owner, name)

    def called(*arguments: Any) -> Any:
        action(*arguments)
        return method(*arguments)

    monkeypatch.setattr(owner, name, called)


def sleep(milliseconds: float, stream: torch.cuda.Stream | None = None) -> None:
    """Keeps a stream busy, the current one unless it is named."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(milliseconds * MILLISECOND))  # type: ignore[no-untyped-call]


def slow_writers(monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> None:
    """Keys and values are computed and written late."""
    before(monkeypatch, Piece, "run", lambda *_: sleep(milliseconds))


def slow_readers(monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> None:
    """Ring slots are read late."""
    for attention in (KernelAttention, PromptAttention):
        before(monkeypatch, attention, "attend", lambda *_: sleep(milliseconds))


def slow_copies(monkeypatch: pytest.MonkeyPatch, milliseconds: float, *, to_device: bool) -> None:
    """Copies of one direction begin late."""

    streams: Any = torch.cuda

    def wait(transfer: Transfer, address: int) -> None:
        if transfer.to_device is to_device:
            sleep(milliseconds, streams.ExternalStream(address))

    before(monkeypatch, Transfer, "launch", wait)


class DeafStream(torch.cuda.Stream):
    """A stream that waits for nothing."""

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def make_deaf(engine: Engine, lane: Lane) -> None:
    """What the lane does from now on, it does without waiting for anybody."""
    torch.cuda.synchronize()
    new: Any = DeafStream
    cuda_executor(engine)._streams[lane] = new(engine._executor.store.device, priority=-1)


# Failures

PROMPTS = (prompt(150), prompt(40, 1))
NEW_TOKENS = 40


def tokens_of(engine: Engine, struck: type[BaseException] | tuple[type[BaseException], ...] = ()) -> list[list[int]]:
    """What two requests get from steps; one that raises what is expected is tried again."""
    tokens = {engine.submit(ids, max_new_tokens=NEW_TOKENS): list[int]() for ids in PROMPTS}
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except struck:
            continue
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
    check_free(engine)
    return list(tokens.values())


@cache
def expected_tokens(dtype: torch.dtype) -> list[list[int]]:
    """The same, undisturbed."""
    with cuda_engine(dtype, drafts=True) as engine:
        return tokens_of(engine)


@dataclass
class Strike:
    """Raises an error after so many calls that it is shown, then after one more, and so on.

    So what is tried again gets through some time, however many calls it makes.
    """

    error: type[BaseException]
    every: int
    only_captured: bool = False
    """Count calls only while the current stream is captured."""
    calls: int = 0
    strikes: int = 0

    def __call__(self, *_: Any) -> None:
        if self.only_captured and not torch.cuda.is_current_stream_capturing():
            return
        self.calls += 1
        if self.calls == self.every:
            self.calls, self.every = 0, self.every + 1
            self.strikes += 1
            raise self.error("struck")
