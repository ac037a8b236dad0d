"""Work memory as it is planned: each term is what real tensors take, and all of it fits into what is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from specstream.attention import LayerAttention
from specstream.block_window import BLOCK_TOKENS, BlockWindow
from specstream.draft import DraftWindow
from specstream.errors import OutOfBudget
from specstream.kv import ChunkLayout, DeviceStore
from specstream.memory import MemoryPlan
from specstream.options import Options
from specstream.planning import Planning
from specstream.profiles import H200
from specstream.round_spec import ChunkRun
from specstream.widths import widths_of
from specstream.work_memory import (
    LIBRARY_BYTES,
    DraftShape,
    WorkMemory,
    piece_bytes,
    prompt_attention_bytes,
    state_bytes,
)
from tests.helpers import captured, model

MIB = 1 << 20
CONFIG: Any = model("qwen3").config
TARGET = captured(model("qwen3"))
HALF = replace(TARGET.spec, dtype=torch.bfloat16)
LAYOUT = ChunkLayout.of(HALF, 16)


def work(**changed: Any) -> WorkMemory:
    given: dict[str, Any] = {"spec": HALF, "layout": LAYOUT, "request_tokens": 1024, "requests": 4, "group_chunks": 8}
    return WorkMemory(**given | {"verified": 4, "rows_of_seat": 5, "draft": None} | changed)


def drafted(window: int | None = 64, seats: int = 4) -> DraftShape:
    return DraftShape(HALF, BlockWindow.of(DraftWindow(4096, window, 4)), seats)


@pytest.mark.parametrize(("name", "widest"), [("qwen3", 48), ("llama3", 48), ("phi3", 48), ("gemma", 4 * 16)])
def test_widths_are_those_of_the_configuration(name: str, widest: int) -> None:
    """Of the tiny Gemma, attention's output is wider than the MLP."""
    module: Any = model(name)
    sizes = module.config.hidden_size, widest
    assert tuple(widths_of(module).values()) == sizes
    spec = captured(module).spec
    assert (spec.hidden_size, spec.intermediate_size) == sizes


def test_a_model_without_an_embedding_is_as_wide_as_its_widest_weight() -> None:
    assert widths_of(nn.Linear(5, 3)) == {"hidden_size": 5, "intermediate_size": 5}
    assert widths_of(nn.LayerNorm(7)) == {"hidden_size": 0, "intermediate_size": 0}


@pytest.mark.parametrize(("seats", "rows_of_seat", "groups"), [(1, 5, 2), (3, 2, 1), (2, 33, 5), (1, 128, 0)])
def test_partial_results_are_what_the_kernels_are_given(seats: int, rows_of_seat: int, groups: int) -> None:
    pytest.importorskip("triton")
    from specstream.attention_choice import KernelChoice

    store = DeviceStore(LAYOUT, 12, 2, 8, torch.device("cpu"))
    choice = KernelChoice(store, HALF, 40, LayerAttention(store))
    runs = tuple(ChunkRun(seat, 8 * group, 8 * group + 8) for seat in range(seats) for group in range(groups))
    sizes = choice.sizes(seats, runs, seats * rows_of_seat, rows_of_seat)
    parts = choice.attention(sizes)._parts
    assert state_bytes(HALF, LAYOUT, sizes) == parts.out.nbytes + parts.lse.nbytes
    larger = choice.sizes(seats + 1, runs, seats * rows_of_seat + 8, rows_of_seat)
    assert larger.rows > sizes.rows


def test_tables_are_those_of_a_round_of_the_longest_requests() -> None:
    pytest.importorskip("triton")
    from specstream.attention_choice import KernelChoice

    given = work()
    chunks, group = LAYOUT.chunks_of(given.request_tokens), given.group_chunks
    store = DeviceStore(LAYOUT, 12, 2, group, torch.device("cpu"))
    choice = KernelChoice(store, HALF, chunks, LayerAttention(store))
    runs = tuple(ChunkRun(seat, at, at + group) for seat in range(4) for at in range(0, chunks, group))
    assert given.tables == choice.sizes(4, runs, 4 * 5, 5)


def test_a_piece_takes_what_its_values_do() -> None:
    rows, heads = 24, HALF.attentions[0].num_heads
    hidden, mlp = (
        torch.empty(rows, CONFIG.hidden_size).bfloat16(),
        torch.empty(rows, CONFIG.intermediate_size).bfloat16(),
    )
    attended = torch.empty(heads, rows, HALF.head_dim).bfloat16()
    assert rows * piece_bytes(HALF) == attended.nbytes + 3 * hidden.nbytes + 3 * mlp.nbytes
    states = 3 * attended.nbytes + attended.float().nbytes
    kv = rows * HALF.kv_bytes_per_token_layer
    assert rows * prompt_attention_bytes(HALF) == states + hidden.nbytes + kv


@torch.inference_mode()
def test_logits_are_those_that_a_model_makes() -> None:
    module: Any = model("qwen3")
    logits = module(torch.zeros(1, 9, dtype=torch.int64)).logits
    assert work(spec=TARGET.spec).logits(9) == logits.nbytes


def test_a_prompt_joins_history_group_by_group_as_far_as_there_is_any() -> None:
    wide = replace(HALF, intermediate_size=1)  # so that attention takes more than pieces
    given, group = work(spec=wide), 8 * LAYOUT.block_bytes
    assert given.prompts(64) - 64 * prompt_attention_bytes(wide) == group
    assert given.prompts(1024 - 16) - 1008 * prompt_attention_bytes(wide) == 16 * wide.kv_bytes_per_token_layer
    assert given.prompts(0) == 0
    narrow = work()
    assert narrow.prompts(4096) == max(4096 * piece_bytes(HALF), 4096 * prompt_attention_bytes(HALF))


def test_more_to_do_never_takes_less() -> None:
    rows = [0, 1, 16, 100, 512, 2048, 8192]
    assert [work().bytes(each) for each in rows] == sorted(work().bytes(each) for each in rows)
    assert work().bytes(4096) == work().bytes(8192), "of all prompts together there are no more"
    assert work().bytes(512) < work(draft=drafted()).bytes(512) < work(draft=drafted(seats=72)).bytes(512)
    for grows in ({"rows_of_seat": 33}, {"verified": 8}, {"spec": replace(HALF, vocab_size=9999)}):
        assert work().bytes(0) < work(**grows).bytes(0)
    for same in ({"group_chunks": 4}, {"request_tokens": 512}):
        assert work().kept - state_bytes(HALF, LAYOUT, work().tables) == (
            work(**same).kept - state_bytes(HALF, LAYOUT, work(**same).tables)
        )


def test_each_stream_that_multiplies_has_its_own_memory() -> None:
    tables = state_bytes(HALF, LAYOUT, work().tables)
    assert work().kept == 3 * LIBRARY_BYTES + tables + work().logits(24)
    more = work(draft=drafted()).kept - work().kept
    assert more > 2 * LIBRARY_BYTES + BLOCK_TOKENS * HALF.vocab_size * 2
    assert more < 3 * LIBRARY_BYTES


def planning(free: int | None) -> Planning:
    return Planning(TARGET, TARGET, H200, free, 1 << 40)


OPTIONS = Options(max_model_len=4096, max_num_seqs=2, drafting="sequential", draft_window=64, chunk_tokens=16)


def planned(free: int | None, **options: Any) -> MemoryPlan:
    return planning(free).memory(replace(OPTIONS, **options))


def taken(memory: MemoryPlan) -> int:
    """Beside the weights."""
    return memory.device_bytes - memory.weights - memory.draft_weights


def test_a_device_that_is_the_host_has_none() -> None:
    assert planning(None).work(OPTIONS) is None
    assert planned(None).workspace == 0
    assert "workspace" not in str(planned(None))
    assert "workspace" in str(planned(1 << 40))


@pytest.mark.parametrize("budget", ["auto", "min", "1MiB"])
def test_what_is_planned_fits_whatever_is_free(budget: str) -> None:
    work = planning(1 << 40).work(OPTIONS)
    assert work is not None
    plans = []
    for free in range(work.least, work.least + 24 * MIB, MIB // 2):
        try:
            plans.append(planned(free, gpu_kv_budget=budget))
        except OutOfBudget:
            assert not plans, "what fits into less fits into more"
            continue
        assert taken(plans[-1]) <= free
        assert plans[-1].workspace >= work.least
    assert len(plans) > 20
    assert plans[0].workspace < plans[-1].workspace <= work.bytes(8192)
    whole = planned(1 << 40, gpu_kv_budget=budget)
    assert whole.workspace == work.bytes(8192)
    assert whole.max_num_batched_tokens == 8192


def test_a_byte_less_than_the_least_is_refused() -> None:
    least = _least(lambda free: planned(free, gpu_kv_budget="min"))
    memory = planned(least, gpu_kv_budget="min")
    work = planning(least).work(OPTIONS)
    assert work is not None
    assert memory.workspace == work.least
    assert memory.device_kv + memory.draft_kv + memory.drawn_from + work.least == least
    with pytest.raises(OutOfBudget, match=r"its distributions .*, workspace .* MiB; .* are free there"):
        planned(least - 1, gpu_kv_budget="min")


def _least(at: Callable[[int], MemoryPlan]) -> int:
    """Free bytes with which it is planned, and with none less."""
    too_little, enough = 0, 1 << 40
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        try:
            at(middle)
            enough = middle
        except OutOfBudget:
            too_little = middle
    return enough


def test_a_resident_request_has_smaller_parts_of_prompts_where_there_is_no_room() -> None:
    kv = planned(1 << 40, max_num_seqs=1).device_kv
    whole = Options(max_model_len=4096, max_num_seqs=1, gpu_kv_budget=kv, chunk_tokens=16)
    alone = Planning(TARGET, None, H200, 1 << 40, 1 << 40)
    assert alone.memory(whole).all_resident
    work = alone.work(whole)
    assert work is not None
    free = alone.memory(whole).device_kv + work.bytes(1000)
    smaller = replace(alone, free_device=free).memory(whole)
    assert smaller.all_resident
    assert 900 < smaller.max_num_batched_tokens <= 1000
    assert taken(smaller) <= free
