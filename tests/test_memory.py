"""The memory plan: figures, refusals, and that what a refusal proposes works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specstream.errors import InvalidOption, OutOfBudget
from specstream.graph import AttentionSpec, ModelSpec
from specstream.memory import MemoryPlan, plan_memory, resolve_batched_tokens
from specstream.options import Options, format_size, parse_size
from tests.helpers import Request, captured, make_engine, model, prompt, reference, serve

ATTENTION = AttentionSpec(0, "attn", num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
SPEC = ModelSpec("tiny", 96, torch.float64, torch.device("cpu"), 8192, (ATTENTION,) * 3)
"""256 bytes a token and layer: with chunks of 4 tokens a block has 1024 bytes and a chunk 3072."""
GIB = 1 << 30


def plan(free_host: int = GIB, spec: ModelSpec = SPEC, **options: Any) -> MemoryPlan:
    defaults: dict[str, Any] = {"max_model_len": 64, "chunk_tokens": 4, "num_speculative_tokens": 3, "max_num_seqs": 1}
    return plan_memory(
        Options(**defaults | options), spec, weights=11, draft_weights=7, draft_kv=5, free_host=free_host
    )


@pytest.mark.parametrize(
    ("options", "slots", "group", "tail", "blocks", "device_kv"),
    [
        ({"gpu_kv_budget": "min"}, 1, 1, 3, 3, 1024 + 3 * 3072),
        ({"gpu_kv_budget": "min", "num_speculative_tokens": 4}, 1, 1, 5, 5, 1024 + 5 * 3072),
        ({"gpu_kv_budget": "min", "num_speculative_tokens": 16, "chunk_tokens": 1}, 1, 1, 35, 35, 256 + 35 * 768),
        ({"gpu_kv_budget": "min", "staging_slots": 3, "group_chunks": 2}, 3, 2, 3, 3, 6 * 1024 + 3 * 3072),
        ({"gpu_kv_budget": "min", "max_num_seqs": 8}, 1, 1, 3, 3, 1024 + 3 * 3072),
        ({"gpu_kv_budget": 16384}, 4, 1, 3, 4, 4 * 1024 + 4 * 3072),
        ({"gpu_kv_budget": 12000}, 2, 1, 3, 3, 2 * 1024 + 3 * 3072),
        ({"gpu_kv_budget": "1MiB"}, 4, 1, 3, 16, 4 * 1024 + 16 * 3072),
        ({"gpu_kv_budget": "1MiB", "max_num_seqs": 2}, 4, 1, 3, 32, 4 * 1024 + 32 * 3072),
        ({"gpu_kv_budget": "1MiB", "max_model_len": 130}, 4, 3, 3, 33, 12 * 1024 + 33 * 3072),
        ({"gpu_kv_budget": "1MiB", "max_model_len": 5}, 4, 1, 3, 3, 4 * 1024 + 3 * 3072),
        ({"gpu_kv_budget": "auto"}, 4, 1, 3, 16, 4 * 1024 + 16 * 3072),
        ({"gpu_kv_budget": "auto", "free_host": 80_000}, 4, 1, 3, 5, 4 * 1024 + 5 * 3072),
        ({"gpu_kv_budget": "auto", "free_host": 70_000}, 4, 1, 3, 4, 4 * 1024 + 4 * 3072),
    ],
)
def test_figures(options: dict[str, Any], slots: int, group: int, tail: int, blocks: int, device_kv: int) -> None:
    result = plan(**options)
    assert (result.staging_slots, result.chunks_per_group) == (slots, group)
    assert (result.tail_slots, result.num_blocks) == (tail, blocks)
    assert result.device_kv == device_kv
    assert result.ring == slots * group * result.layout.block_bytes
    assert (result.weights, result.draft_weights, result.draft_kv) == (11, 7, 5)
    assert result.full_kv == result.layout.chunks_of(result.max_model_len) * result.layout.chunk_bytes


@pytest.mark.parametrize(
    ("max_len", "chunk"), [(1, 16), (63, 16), (64, 16), (1024, 16), (2048, 32), (4095, 32), (8192, 128)]
)
def test_automatic_chunks(max_len: int, chunk: int) -> None:
    assert plan(max_model_len=max_len, chunk_tokens="auto").layout.chunk_tokens == chunk


@pytest.mark.parametrize(
    ("layers", "slots"),
    [(36, 4), (28, 4), (32, 4), (24, 4), (30, 5), (42, 6), (21, 7), (18, 6), (6, 6), (3, 4), (31, 4), (22, 4)],
)
def test_the_ring_of_a_device_of_its_own_is_as_long_as_divides_the_layers(layers: int, slots: int) -> None:
    """Then a round of any number of groups leaves the ring where it found it; a prime number of layers cannot."""
    deep = ModelSpec("deep", 96, torch.float64, torch.device("cpu"), 8192, (ATTENTION,) * layers)
    options = Options(max_model_len=4096, max_num_seqs=2)
    sizes: dict[str, Any] = {"weights": 0, "free_host": 64 * GIB, "free_device": GIB}
    assert plan_memory(options, deep, **sizes).staging_slots == slots
    assert plan_memory(replace(options, staging_slots=5), deep, **sizes).staging_slots == 5


@pytest.mark.parametrize(
    ("tokens", "requests", "group"),
    [(16_384, 8, 64), (32_768, 1, 32), (65_536, 1, 64), (131_072, 1, 128), (262_144, 1, 128), (131_072, 16, 256)],
)
def test_a_layer_has_few_groups_on_a_device_of_its_own(tokens: int, requests: int, group: int) -> None:
    """Qwen3-8B's shape: groups of 64 to 256 MiB, and at most 16 a layer, or one a request."""
    attention = AttentionSpec(0, "a", 32, 8, 128, 1.0)
    model = ModelSpec("8b", 96, torch.bfloat16, torch.device("cpu"), 1 << 20, (attention,) * 36)
    options = Options(max_model_len=tokens, max_num_seqs=requests)
    sizes: dict[str, Any] = {"weights": 0, "free_host": 1024 * GIB, "free_device": 128 * GIB}
    assert plan_memory(options, model, **sizes).chunks_per_group == group


def test_resident_chunks() -> None:
    result = plan(gpu_kv_budget=4 * 1024 + 10 * 3072, max_num_seqs=2)
    assert result.num_blocks == 10
    assert [result.resident_chunks(total, 10, 2) for total in (1, 7, 8, 16)] == [1, 7, 4, 4]
    assert [result.resident_chunks(total, 3, 1) for total in (1, 3, 4, 16)] == [1, 3, 0, 0]


def test_text_of_a_plan() -> None:
    assert str(plan(gpu_kv_budget="min", host_kv_budget="1MiB")).splitlines() == [
        "target weights                               11 B",
        "draft weights                                 7 B",
        "draft KV                                      5 B",
        "ring of 1 x 1 chunks                     1.00 KiB",
        "3 blocks of 4 tokens                     9.00 KiB",
        "prompt buffer of 2 x 16 chunks          32.00 KiB",
        "host KV, at most                         1.00 MiB",
        "one request of 64 tokens                48.00 KiB",
    ]


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({"max_num_batched_tokens": 20}, 5 + 1),  # and one that it may begin within
        ({"max_num_batched_tokens": 21}, 6 + 1),
        ({"max_num_batched_tokens": 20, "max_num_seqs": 3}, 5 + 3),
        ({"max_num_batched_tokens": 64}, 16),  # a whole request
        ({"max_num_batched_tokens": 2048, "max_num_seqs": 2}, 2 * 16),
        ({}, 16),
        ({"gpu_kv_budget": "auto"}, 0),  # nothing ever streams
        ({"gpu_kv_budget": 4 * 1024 + 15 * 3072}, 16),
    ],
)
def test_the_prompt_buffer_holds_a_round_of_prompts(options: dict[str, Any], chunks: int) -> None:
    result = plan(**{"gpu_kv_budget": "min"} | options)
    assert result.prompt_chunks == chunks
    assert result.prompt_buffer == 2 * chunks * 1024


def test_prompt_tokens_of_a_round() -> None:
    for own_device, tokens in ((False, 2048), (True, 8192)):
        assert resolve_batched_tokens(Options(), own_device=own_device) == tokens
        assert resolve_batched_tokens(Options(max_num_batched_tokens=7), own_device=own_device) == 7
    assert plan().max_num_batched_tokens == 2048
    on_device = plan_memory(Options(max_model_len=64), SPEC, weights=0, free_host=GIB, free_device=GIB)
    assert on_device.max_num_batched_tokens == 8192


def test_an_automatic_budget_of_a_device_leaves_room_for_the_prompt_buffer() -> None:
    def device_kv(batched: int) -> int:
        options = Options(max_model_len=8192, max_num_seqs=1, chunk_tokens=64, max_num_batched_tokens=batched)
        return plan_memory(options, SPEC, weights=0, free_host=GIB, free_device=6 << 20).device_kv

    chunks = 64 - 1
    assert device_kv(64) - device_kv(64 * 64) == pytest.approx(2 * chunks * 64 * 256, abs=64 * 768)


# Planned is allocated


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_kv_budget": "min"},
        {"gpu_kv_budget": "min", "staging_slots": 3, "group_chunks": 2},
        {"gpu_kv_budget": 100_000},
        {"gpu_kv_budget": "auto"},
        {"gpu_kv_budget": 100_000, "draft_window": 5, "max_model_len": 900},
    ],
)
def test_planned_bytes_are_allocated_bytes(options: dict[str, Any]) -> None:
    target, draft = model("qwen3"), model("llama", seed=1)
    shapes = {"max_model_len": 64, "chunk_tokens": 4, "max_num_seqs": 2} | options
    with make_engine(target, draft, **shapes) as engine:
        memory, drafter = engine.memory, engine._speculator.drafter
        store = engine._executor.store
        assert memory.device_kv == store.blocks.untyped_storage().nbytes() + store.ring.untyped_storage().nbytes()
        assert memory.prompt_buffer == store.prompt.untyped_storage().nbytes()
        if isinstance(options["gpu_kv_budget"], int):
            assert memory.device_kv <= options["gpu_kv_budget"]
        assert memory.weights == captured(target).weight_bytes
        requests = [Request(prompt(8), 6), Request(prompt(9), 6)]
        for request in requests:
            engine.submit(request.prompt, max_new_tokens=8)
        most = 0
        while engine.has_unfinished:
            engine.step()
            assert drafter is not None
            most = max(most, sum(kv.untyped_storage().nbytes() for kv in drafter._kv.values()))
            assert engine._host.allocated_bytes <= memory.host_budget
        assert most <= memory.draft_kv
        if options["gpu_kv_budget"] in ("auto", 100_000):  # both had a seat at a time
            assert most == memory.draft_kv


def test_the_draft_allocates_once_for_a_seat() -> None:
    with make_engine(model("qwen3"), model("qwen3"), max_model_len=64, num_speculative_tokens=2) as engine:
        drafter, seen = engine._speculator.drafter, set()
        assert drafter is not None
        engine.submit(prompt(9), max_new_tokens=20)
        while engine.has_unfinished:
            engine.step()
            seen |= {kv.data_ptr() for kv in drafter._kv.values()}
        assert len(seen) == 1


def test_weights_are_counted_once() -> None:
    for name in ("qwen3", "llama"):  # tied and not
        target = model(name)
        assert captured(target).weight_bytes >= sum(p.nbytes for p in target.parameters())
        assert captured(target).weight_bytes <= 1.01 * sum(t.nbytes for t in (*target.parameters(), *target.buffers()))


# Refusals


def least(**options: Any) -> int:
    return plan(**options | {"gpu_kv_budget": "min"}).device_kv


def test_one_byte_less_than_min_is_refused_with_that_figure() -> None:
    assert plan(gpu_kv_budget=10240).device_kv == 10240
    with pytest.raises(OutOfBudget) as error:
        plan(gpu_kv_budget=10239)
    assert str(error.value) == (
        "gpu_kv_budget is 10.00 KiB; the least that works is 10.00 KiB (10240 bytes): 3 chunks of 4 tokens for a tail "
        'and a ring. Ways out: gpu_kv_budget="min", or chunk_tokens=2, which fits'
    )
    assert plan(gpu_kv_budget=10239, chunk_tokens=2).device_kv <= 10239
    with pytest.raises(OutOfBudget) as error:
        plan(gpu_kv_budget=100)
    assert str(error.value) == (
        "gpu_kv_budget is 100 B; the least that works is 10.00 KiB (10240 bytes): 3 chunks of 4 tokens for a tail "
        'and a ring. Way out: gpu_kv_budget="min"'
    )


OPTIONS = st.fixed_dictionaries(
    {
        "max_model_len": st.integers(1, 600),
        "num_speculative_tokens": st.integers(1, 16),
        "max_num_seqs": st.integers(1, 4),
        "chunk_tokens": st.sampled_from(["auto", 1, 3, 4, 16, 100]),
        "group_chunks": st.sampled_from(["auto", 1, 3]),
        "staging_slots": st.sampled_from(["auto", 1, 3]),
    }
)


@settings(max_examples=200)
@given(OPTIONS, st.integers(1, 200_000))
def test_a_device_budget_works_or_the_refusal_says_what_does(options: dict[str, Any], budget: int) -> None:
    try:
        result = plan(gpu_kv_budget=budget, **options)
    except OutOfBudget as error:
        needed = int(re.findall(r"\((\d+) bytes\)", str(error))[0])
        assert budget < needed == least(**options)
        assert plan(gpu_kv_budget=needed, **options).device_kv == needed
        with pytest.raises(OutOfBudget, match=f"{needed} bytes"):
            plan(gpu_kv_budget=needed - 1, **options)
        for smaller in re.findall(r"chunk_tokens=(\d+)", str(error)):
            assert plan(gpu_kv_budget=budget, **options | {"chunk_tokens": int(smaller)}).device_kv <= budget
    else:
        assert least(**options) <= result.device_kv <= budget
        assert result.num_blocks >= result.tail_slots


def test_a_host_budget_that_is_too_small_is_refused_with_what_fits() -> None:
    with pytest.raises(OutOfBudget) as error:
        plan(gpu_kv_budget="min", host_kv_budget=20_000)
    assert str(error.value) == (
        "a request of max_model_len=64 tokens needs 48.00 KiB of host memory; host_kv_budget is 19.53 KiB. "
        "max_model_len=24 would fit, or a larger host_kv_budget or gpu_kv_budget"
    )
    assert plan(gpu_kv_budget="min", host_kv_budget=20_000, max_model_len=24).extent_chunks == 6
    with pytest.raises(OutOfBudget):
        plan(gpu_kv_budget="min", host_kv_budget=20_000, max_model_len=25)
    assert plan(gpu_kv_budget="min", host_kv_budget=16 * 3072).extent_chunks == 16
    with pytest.raises(OutOfBudget) as error:  # not one chunk fits: no length is proposed
        plan(gpu_kv_budget="min", host_kv_budget=3071)
    assert str(error.value) == (
        "a request of max_model_len=64 tokens needs 48.00 KiB of host memory; host_kv_budget is 3.00 KiB. "
        "Way out: a larger host_kv_budget or gpu_kv_budget"
    )


@settings(max_examples=300)
@given(OPTIONS, st.integers(1, 100_000), st.sampled_from(["min", 40_000, 400_000]))
def test_a_host_budget_works_or_the_refusal_says_what_does(
    options: dict[str, Any], host: int, budget: int | str
) -> None:
    try:
        result = plan(gpu_kv_budget=budget, host_kv_budget=host, **options)
    except OutOfBudget as error:
        if "host_kv_budget" not in str(error):
            return
        for length in re.findall(r"max_model_len=(\d+) would fit", str(error)):
            plan(gpu_kv_budget=budget, host_kv_budget=host, **options | {"max_model_len": int(length)})
    else:
        assert result.extent_chunks * result.layout.chunk_bytes <= host


@pytest.mark.parametrize("requests", [1, 2])
def test_fewer_requests_are_a_way_out_if_there_are_several(requests: int) -> None:
    with pytest.raises(OutOfBudget) as error:
        plan_memory(Options(max_model_len=64, max_num_seqs=requests), SPEC, weights=0, free_host=GIB, free_device=9999)
    assert "or a device with more memory" in str(error.value)
    assert ("fewer max_num_seqs" in str(error.value)) == (requests > 1)


def test_max_model_len_beyond_the_positions_is_refused() -> None:
    with pytest.raises(InvalidOption) as error:
        plan(max_model_len=20_000)
    assert str(error.value) == (
        "max_model_len: got 20000; allowed: at most 8192, the positions tiny covers. "
        'Beyond that, load it with rope_parameters of rope_type "yarn" and factor 2.4 or more.'
    )
    assert plan(max_model_len="auto").max_model_len == 8192
    boundless = ModelSpec("plain", 96, torch.float64, torch.device("cpu"), None, (ATTENTION,))
    with pytest.raises(InvalidOption) as error:
        plan(spec=boundless, max_model_len="auto")
    assert str(error.value) == (
        "max_model_len: got 'auto'; allowed: a number of tokens, since the model states no limit."
    )


def test_requests_wait_for_host_memory_and_are_served_in_the_end() -> None:
    target = model("qwen3")
    with make_engine(
        target,
        chunk_tokens=4,
        max_model_len=32,
        max_num_seqs=3,
        gpu_kv_budget=4 * 1024 + 9 * 3072,
        num_speculative_tokens=3,
        host_kv_budget=8 * 3072,  # one request at a time
        debug=True,
    ) as engine:
        most = 0
        requests = [Request(prompt(20, seed), 9) for seed in range(3)]

        def watch() -> None:
            nonlocal most
            most = max(most, len(engine._scheduler.running))
            assert engine._host.allocated_bytes <= 8 * 3072

        serve(engine, requests, watch)
        assert most == 1
    for request in requests:
        assert request.tokens == reference(target, request.prompt, 24).tokens[:9]


@pytest.mark.parametrize(
    ("size", "count"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5KiB", 1536), ("1e3", 1000), ("2GB", 2 * 10**9), (7, 7), ("8B", 8)],
)
def test_sizes_in_words(size: int | str, count: int) -> None:
    assert parse_size("gpu_kv_budget", size) == count


@pytest.mark.parametrize("size", ["", "4 gibs", "-1GiB", 0, -5, 1.5, True, "min", "0", "nanGiB"])
def test_sizes_that_are_refused(size: Any) -> None:
    with pytest.raises(InvalidOption, match='allowed: a positive number of bytes or text such as "4GiB"'):
        parse_size("gpu_kv_budget", size)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "3.00 GiB",
        "7.00 TiB",
    ]
