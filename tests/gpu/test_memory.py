"""vllm 9995: what is planned suffices, models and drafts included; what does not is refused before it is allocated.

These fill the device: nothing else may use it meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from specstream.api import build_engine
from specstream.compiler import compile_model
from specstream.engine import Engine
from specstream.errors import OutOfBudget
from specstream.options import Options
from tests.cuda_cases import cuda_engine
from tests.helpers import step_to_end

MIB = 1 << 20
SLACK = 256 * MIB
"""What other tests have left in pieces does not count."""
Leave = Callable[[int], object]
"""Makes so many bytes be left for tensors to come."""


def cap(more: int) -> None:
    """Torch's allocator is refused more than it has now and so many bytes."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / total))


def fill(left: int) -> Tensor:
    """A tensor that takes all memory of the device but so many bytes."""
    torch.cuda.empty_cache()
    return torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")


@pytest.fixture(autouse=True)
def uncapped() -> Iterator[None]:
    gc.collect()  # engines of other tests
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def sized_model(layers: int) -> nn.Module:
    """30 MiB of weights a layer in bfloat16, and 4 KiB of KV a token and layer."""
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=65_536,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def sized_engine() -> Engine:
    """Everything streamed through a ring of 6 GiB: most of what is planned, so that the work is the rest."""
    options = Options(
        max_model_len=16_384,
        max_num_seqs=4,
        chunk_tokens=512,
        group_chunks=16,
        staging_slots=192,
        gpu_kv_budget=192 * 16 * 2 * MIB + 4 * 3 * 16 * MIB,
        max_num_batched_tokens=2048,
        draft_window=1024,
    )
    target, draft = (compile_model(sized_model(layers), "sized", 16_384) for layers in (8, 2))
    return build_engine(options, target, draft)


def planned(engine: Engine) -> int:
    memory = engine.memory
    return memory.weights + memory.draft_weights + memory.draft_kv + memory.device_kv + memory.prompt_buffer


def serve_four(engine: Engine, after_step: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    for seed in range(4):
        ids = torch.randint(4096, (3000 - 500 * seed,), generator=torch.Generator().manual_seed(seed))
        engine.submit(ids.tolist(), max_new_tokens=24)
    after_step(0)
    return list(step_to_end(engine).values())


def test_all_work_fits_the_planned_bytes_and_5_percent() -> None:
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    with sized_engine() as engine:
        most = int(1.05 * planned(engine))
        torch.cuda.empty_cache()
        cap(reserved + most - torch.cuda.memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        assert [len(tokens) for tokens in serve_four(engine)] == [24] * 4
        assert engine.metrics().streamed_bytes > 0
        peak = torch.cuda.max_memory_allocated() - allocated
    print(f"\nplanned {planned(engine) / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB")
    assert peak <= most


def test_a_device_that_is_full_in_the_middle_of_a_prompt() -> None:
    with sized_engine() as engine:
        expected = serve_four(engine)

        def interlude(_: int) -> None:
            engine.step()
            cap(0)
            held = fill_up()
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                engine.step()
            del held
            torch.cuda.set_per_process_memory_fraction(1.0)

        assert serve_four(engine, interlude) == expected


def fill_up() -> list[Tensor]:
    """Tensors that take all that the allocator's cap leaves, but for pieces below 1 MiB."""
    held: list[Tensor] = []
    for size in (64 * MIB, 8 * MIB, MIB):
        while True:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return held


@pytest.mark.parametrize("leave", [cap, fill], ids=["capped", "filled"])
def test_what_does_not_fit_is_refused_before_anything_is_allocated(leave: Leave) -> None:
    ring: dict[str, Any] = {"group_chunks": 1024, "staging_slots": 64, "gpu_kv_budget": "min"}  # 1 GiB
    with cuda_engine(torch.float32, **ring) as engine:
        kv, needed = engine.memory.device_kv, engine.memory.device_kv + engine.memory.workspace
        assert kv > 1024 * MIB
    del engine
    gc.collect()
    before = torch.cuda.memory_allocated()
    held = leave(needed - SLACK)
    took = torch.cuda.memory_allocated()
    takes = r"takes 1\.00 GiB, workspace .* MiB; .* MiB are free there\. The least that works is 1\."
    with pytest.raises(OutOfBudget, match=takes):
        cuda_engine(torch.float32, **ring)
    with pytest.raises(OutOfBudget, match="Way out: a gpu_kv_budget of at most"):
        cuda_engine(torch.float32, max_model_len=8192, max_num_seqs=64, gpu_kv_budget="2GiB")
    assert torch.cuda.memory_allocated() == took
    del held
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == before
    held = leave(needed + SLACK)
    with cuda_engine(torch.float32, **ring) as engine:
        assert engine.memory.device_kv == kv
    del held
