"""Device profiles: how they are found, what tasks cost by them, and how near that comes to what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from specstream.cost import DeviceProfile
from specstream.errors import InvalidOption
from specstream.exposure import exposure
from specstream.graph import AttentionSpec, ModelSpec, PartitionedModel, Piece
from specstream.idle import idle_bytes
from specstream.options import Options
from specstream.planner import Planner
from specstream.profiles import CPU_PROFILE, H200, PROFILES, cuda_profile, find_profile, named_profile
from specstream.ring import Fill, longer_ring
from specstream.round_graph import Task, TaskKind
from specstream.round_plan import Lane, lane_of
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.round_work import DraftWork
from specstream.simulate import simulate
from specstream.steady import steady_round
from tests.toy import toy_model

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "h200.json"
BY_TORCH_NAME = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
}
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 36, 4096, 32, 8, 128, 12_288, 151_936
"""Qwen3-8B's."""
QWEN3_06B = DraftWork(1_191_000_000, 28)
"""Qwen3-0.6B in bfloat16: its embedding table is the output head too."""
KV_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""Of a token in a layer."""
LINK_KINDS = (TaskKind.FETCH, TaskKind.OFFLOAD)


@pytest.mark.parametrize(("torch_name", "name"), BY_TORCH_NAME.items())
def test_a_profile_is_found_by_torchs_name_and_by_its_own(torch_name: str, name: str) -> None:
    profile = cuda_profile(torch_name)
    assert profile.name == name
    assert find_profile(name) is find_profile(name.upper()) is named_profile("device", torch_name) is profile
    assert profile.device_memory_bytes is not None
    assert 24e9 <= profile.device_memory_bytes <= 141e9


def test_every_profile_but_the_cpus_is_tried() -> None:
    assert [*BY_TORCH_NAME.values(), "cpu"] == [profile.name for profile in PROFILES]
    assert named_profile("device", "cpu") is CPU_PROFILE


@pytest.mark.parametrize(
    "relative", ["NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090 D", "Tesla T4"]
)
def test_an_unknown_cuda_device_is_taken_for_the_one_that_was_measured(relative: str) -> None:
    assert find_profile(relative) is None
    assert cuda_profile(relative) is H200


def test_an_unknown_name_of_a_users_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidOption) as refused:
        named_profile("device", "rtx-2080")
    assert str(refused.value) == (
        "device: got 'rtx-2080'; allowed: h200, h100, gh200, a100-80g, l40s, rtx-5090, rtx-4090, rtx-3090, cpu."
    )


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_copy_costs_its_bytes_at_the_rate_of_its_direction(profile: DeviceProfile) -> None:
    rates = profile.host_to_device_bytes_per_us, profile.device_to_host_bytes_per_us
    for kind, rate in zip(LINK_KINDS, rates, strict=True):
        copy = Task("copy", kind, link_bytes=10**9, memory_bytes=10**12, flops=10**18)
        assert profile.cost_us(copy) == profile.launch_us + 10**9 / rate
        assert profile.cost_us(copy._replace(link_bytes=10**9 + 1)) > profile.cost_us(copy)


@pytest.mark.parametrize("profile", [p for p in PROFILES if p is not CPU_PROFILE], ids=lambda profile: profile.name)
def test_a_task_costs_what_takes_longer_its_bytes_or_its_operations(profile: DeviceProfile) -> None:
    def cost(memory_bytes: int, flops: int) -> float:
        return profile.cost_us(Task("piece", TaskKind.PIECE, memory_bytes=memory_bytes, flops=flops))

    ridge = profile.flops_per_us / profile.memory_bytes_per_us
    few, many = int(10**9 * ridge / 2), int(10**9 * ridge * 2)
    assert cost(0, 0) == profile.launch_us
    assert cost(10**9, few) == cost(10**9, 0) == profile.launch_us + 10**9 / profile.memory_bytes_per_us
    assert cost(10**9, many) == cost(0, many) == profile.launch_us + many / profile.flops_per_us
    assert cost(10**9, few) < cost(2 * 10**9, few)
    assert cost(10**9, many) < cost(10**9, 2 * many)


def test_on_a_cpu_only_bytes_count() -> None:
    task = Task("piece", TaskKind.PIECE, memory_bytes=10_000)
    assert CPU_PROFILE.cost_us(task) == CPU_PROFILE.cost_us(task._replace(flops=10**15)) == 32


@pytest.mark.parametrize(
    ("context", "batch", "chunk_tokens", "group"),
    [(32_768, 1, 512, 32), (16_384, 8, 256, 64), (131_072, 1, 512, 32)],
)
def test_predicted_rounds_are_near_those_measured(context: int, batch: int, chunk_tokens: int, group: int) -> None:
    """Verifications of 5 rows of Qwen3-8B on an H200, nothing resident."""
    options = f"--target qwen3-8b --dtype bfloat16 --context {context} --batch {batch} --queries 5 --resident 0"
    measured = json.loads(RESULTS.read_text())["runs"][f"round {options}"]
    streamed = context // chunk_tokens - 1
    seats = tuple(SeatSpec(seat, 0, 3, streamed, 0, streamed, 2) for seat in range(batch))
    spec = RoundSpec(LAYERS, 4, group, chunk_tokens * KV_BYTES, seats, 0, 0)
    assert spec.streamed_bytes == measured["streamed_bytes_per_round"]
    planner = Planner(qwen3_8b(), H200, verified_rows=5)
    predicted = steady_round(planner.plan(spec.warm().canonical())).period_us / 1e3
    assert predicted == pytest.approx(measured["round_ms"], rel=0.05)


def test_a_round_and_a_draft_step_of_a_few_kernels_a_layer_are_predicted() -> None:
    """With everything on the device, small kernels take a quarter of the target's time and most of the draft's."""
    runs = json.loads(RESULTS.read_text())["runs"]
    resident = RoundSpec(LAYERS, 4, 1, 64 * KV_BYTES, (SeatSpec(0, 16, 1, 0, 0, 15, 1),), 0, 1)
    plan = Planner(qwen3_8b(), H200, QWEN3_06B).plan(resident.canonical())
    busy = {lane: sum(t.cost_us for t in plan.tasks if lane_of(t) is lane) / 1e3 for lane in (Lane.TARGET, Lane.DRAFT)}
    measured = runs["resident_baseline.py --context 1024"]["round_graph_ms"]
    assert busy[Lane.TARGET] == pytest.approx(measured, rel=0.05)
    (drafting,) = (run for name, run in runs.items() if name.startswith("generate --target qwen3-0.6b"))
    assert plan.by_name["draft/0"].cost_us / 1e3 == pytest.approx(drafting["draft_step_ms"], rel=0.05)


def test_predicted_prompts_are_near_those_measured() -> None:
    """A prompt of 32,768 tokens in four parts: the processors limit it, as when all its KV stays on the device."""
    measured = json.loads(RESULTS.read_text())["runs"]["prefill_baseline.py --context 32768"]
    planner, predicted = Planner(qwen3_8b(), H200, verified_rows=5), 0.0
    for done in range(0, 64, 16):
        part = SeatSpec(0, 0, 3, streamed=done, offload=16, open=done, span=16, buffer_start=0)
        spec = RoundSpec(LAYERS, 4, 32, 512 * KV_BYTES, (part,), 0, 0)
        (timeline,) = simulate([planner.plan(spec.warm().canonical())])
        predicted += timeline.period_us / 1e6
    assert predicted == pytest.approx(measured["resident_seconds"], rel=0.05)


@pytest.mark.parametrize(
    ("cohort", "context", "depth"), [(1, 16_384, 4), (2, 8192, 4), (4, 16_384, 4), (1, 16_384, 16)]
)
def test_drafts_of_the_other_cohort_are_predicted_to_be_hidden(cohort: int, context: int, depth: int) -> None:
    """Two cohorts of so many requests on an H200, Qwen3-0.6B drafting; and not so after the round's own acceptance."""
    streamed = context // 256 - 1
    seats = tuple(SeatSpec(seat, 0, 3, streamed, 0, streamed, 2) for seat in range(cohort))
    runs = tuple(ChunkRun(cohort + seat.seat, 0, streamed) for seat in seats)
    after = RoundSpec(LAYERS, 4, 64, 256 * KV_BYTES, seats, 0, depth).warm()
    beside = replace(after, drafts_beside=True, next_runs=runs)
    planner = Planner(qwen3_8b(), H200, draft=QWEN3_06B, verified_rows=depth + 1)
    hidden, exposed = (exposure(planner.plan(spec.canonical()), Lane.DRAFT) for spec in (beside, after))
    assert hidden.busy_us == pytest.approx(exposed.busy_us)
    assert hidden.busy_us > 1000
    assert hidden.hidden_share > 0.97
    assert depth < 16 or exposed.hidden_share < 0.97


@pytest.mark.parametrize(
    ("batch", "context", "chunk_tokens", "group", "depth"),
    [(1, 32_768, 512, 32, 4), (1, 32_768, 512, 32, 12), (4, 8192, 256, 32, 4), (8, 16_384, 256, 64, 4)],
)
def test_drafts_after_acceptance_are_predicted_to_be_hidden_by_a_ring_that_is_long_enough(
    batch: int, context: int, chunk_tokens: int, group: int, depth: int
) -> None:
    """The link goes on, and the target catches up; with four slots it would have to wait."""
    streamed = context // chunk_tokens - 1
    seats = tuple(SeatSpec(seat, 0, 3, streamed, 0, streamed, 2) for seat in range(batch))
    idle = idle_bytes(Options(num_speculative_tokens=depth), H200, QWEN3_06B)
    planner = Planner(qwen3_8b(), H200, QWEN3_06B, verified_rows=depth + 1)

    def exposed(slots: int) -> float:
        spec = RoundSpec(LAYERS, slots, group, chunk_tokens * KV_BYTES, seats, 0, depth).warm()
        return exposure(planner.plan(spec.canonical()), Lane.DRAFT).exposed_us

    assert exposed(longer_ring(LAYERS, 4, Fill(chunk_tokens * KV_BYTES, group, streamed), idle, 4 << 30)) < 50
    assert exposed(4) > 200


def qwen3_8b() -> PartitionedModel:
    """Pieces with weights of its sizes on no device, without the embedding table."""
    before = (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN
    after = HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INTERMEDIATE
    weights = [before, *[after + before] * (LAYERS - 1), after + VOCAB * HIDDEN]
    toy = toy_model(LAYERS)
    attentions = tuple(AttentionSpec(i, "", HEADS, KV_HEADS, HEAD_DIM, 1.0) for i in range(LAYERS))
    sites = tuple(replace(site, spec=attention) for site, attention in zip(toy.sites, attentions, strict=True))
    spec = ModelSpec("qwen3-8b", VOCAB, torch.bfloat16, torch.device("meta"), None, attentions)
    model = replace(toy, pieces=tuple(map(weighing, toy.pieces, weights)), sites=sites, spec=spec)
    assert model.read_bytes == pytest.approx(15.14e9, rel=1e-3)
    return model


def weighing(piece: Piece, parameters: int) -> Piece:
    """The piece with so many parameters in bfloat16."""
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.empty(parameters, dtype=torch.bfloat16, device="meta"))
    graph = fx.Graph()
    for name in piece.inputs:
        graph.placeholder(name)
    graph.get_attr("weight")
    graph.output((None,) * len(piece.outputs))
    return replace(piece, module=fx.GraphModule(module, graph))
