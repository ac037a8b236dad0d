"""The two tiers of the KV store: runs, references, reuse, and NaN where memory is free."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specstream.errors import OutOfBudget
from specstream.kv import ChunkLayout, DeviceStore, HostRun, HostStore, SequenceKV

LAYOUT = ChunkLayout(num_layers=3, num_kv_heads=2, head_dim=8, chunk_tokens=4, dtype=torch.float64)


def host_store(extent: int = 6, extents: int = 2, debug: bool = True) -> HostStore:
    return HostStore(LAYOUT, extents * extent * LAYOUT.chunk_bytes, extent, debug)


def place(store: HostStore, run: HostRun | None) -> tuple[int, int, int]:
    """Which extent, and which chunks of it."""
    assert run is not None
    number = next(i for i, extent in enumerate(store.extents) if extent is run.extent)
    return number, run.start, run.start + run.count


def test_layout_sizes() -> None:
    assert LAYOUT.block_shape == (2, 2, 4, 8)
    assert LAYOUT.block_bytes == torch.empty(LAYOUT.block_shape, dtype=torch.float64).nbytes == 1024
    assert LAYOUT.chunk_bytes == 3 * 1024
    assert [LAYOUT.chunks_of(tokens) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_runs_go_to_the_first_fit() -> None:
    store = host_store()
    first, second = store.reserve(2), store.reserve(3)
    assert (place(store, first), place(store, second)) == ((0, 0, 2), (0, 2, 5))
    third = store.reserve(2)
    assert place(store, third) == (1, 0, 2)
    assert place(store, store.reserve(1)) == (0, 5, 6)
    assert first is not None
    store.release(first, 0, 2)
    assert place(store, store.reserve(2)) == (0, 0, 2)
    assert len(store.extents) == 2


def test_extents_are_allocated_as_they_are_needed_and_up_to_the_budget() -> None:
    store = host_store(extent=4, extents=2)
    assert (store.allocated_bytes, store.used_bytes) == (0, 0)
    runs = []
    for held in (1, 2):
        runs.append(store.reserve(3))
        assert store.allocated_bytes == held * 4 * LAYOUT.chunk_bytes
        assert store.allocated_bytes == sum(extent.blocks.untyped_storage().nbytes() for extent in store.extents)
        assert store.used_bytes == held * 3 * LAYOUT.chunk_bytes
    assert store.reserve(3) is None  # it has to wait
    assert store.reserve(1) is not None
    assert runs[0] is not None
    store.release(runs[0], 0, 3)
    assert store.reserve(3) is not None
    store.close()
    assert store.allocated_bytes == 0


def test_a_run_longer_than_any_can_be_is_refused() -> None:
    with pytest.raises(OutOfBudget) as error:
        host_store(extent=6).reserve(7)
    assert str(error.value) == (
        "7 chunks (21.00 KiB) exceed what the host tier holds for one request: 6 chunks of 4 tokens"
    )


def test_a_chunk_is_free_once_nobody_holds_it_and_is_nan_then() -> None:
    store = host_store()
    run = store.reserve(4)
    assert run is not None
    run.extent.blocks.zero_()
    store.retain(run, 1, 3)
    store.release(run, 0, 4)
    assert run.extent.references == [0, 1, 1, 0, 0, 0]
    assert run.extent.blocks[:, [0, 3]].isnan().all()
    assert not run.extent.blocks[:, [1, 2, 4, 5]].isnan().any()
    assert store.used_bytes == 2 * LAYOUT.chunk_bytes
    assert place(store, store.reserve(3)) == (0, 3, 6)
    store.release(run, 1, 3)
    assert place(store, store.reserve(3)) == (0, 0, 3)


def test_without_debug_freed_memory_is_left_alone() -> None:
    store = host_store(debug=False)
    run = store.reserve(2)
    assert run is not None
    run.extent.blocks.zero_()
    store.release(run, 0, 2)
    assert not run.extent.blocks.isnan().any()


def test_a_view_is_the_memory_itself_and_chunks_of_a_layer_are_neighbours() -> None:
    store = host_store()
    store.reserve(1)
    run = store.reserve(4)
    assert run is not None
    view = run.view(2, 1, 3)
    assert view.shape == (2, *LAYOUT.block_shape)
    assert view.is_contiguous()
    view.fill_(7)
    assert (run.extent.blocks[2, 2:4] == 7).all()
    assert (run.extent.blocks == 7).sum() == view.numel()


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=30))
def test_runs_never_overlap_and_everything_comes_back(steps: list[tuple[int, int]]) -> None:
    store, held = host_store(), []
    for count, victim in steps:
        run = store.reserve(count)
        if run is not None:
            held.append(run)
        elif held:
            gone = held.pop(victim % len(held))
            store.release(gone, 0, gone.count)
        taken = [place(store, run) for run in held]
        chunks = [(number, chunk) for number, start, stop in taken for chunk in range(start, stop)]
        assert len(set(chunks)) == len(chunks) == store.used_bytes // LAYOUT.chunk_bytes
        assert store.allocated_bytes <= store.budget_bytes
    for run in held:
        store.release(run, 0, run.count)
    assert store.used_bytes == 0
    assert store.reserve(6) is not None


GROWTH = """
import psutil, torch
from specstream.kv import ChunkLayout, HostStore
layout = ChunkLayout(2, 2, 8, 4, torch.float32)
chunks = 67 * (1 << 20) // layout.chunk_bytes
store = HostStore(layout, chunks * layout.chunk_bytes, chunks)
before = psutil.Process().memory_info().rss
run = store.reserve(chunks)
run.extent.blocks.fill_(1.0)
print(psutil.Process().memory_info().rss - before, store.allocated_bytes, run.extent.blocks.untyped_storage().nbytes())
"""


def test_host_memory_grows_by_what_was_planned() -> None:
    """vllm 53042: pinned allocations round up to a power of two. 67 MiB are just above one.

    In a process of its own: here, memory that other tests free would count against the growth.
    """
    printed = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, cwd="/")
    grown, allocated, stored = map(int, printed.stdout.split())
    assert allocated == stored == 67 << 20
    assert abs(grown - allocated) < 0.05 * allocated


@pytest.fixture
def device() -> DeviceStore:
    return DeviceStore(LAYOUT, 6, 2, 3, torch.device("cpu"), debug=True)


def test_device_blocks_are_taken_in_order_and_are_nan_when_given_back(device: DeviceStore) -> None:
    assert device.blocks.isnan().all()
    assert device.ring.isnan().all()
    assert device.total_bytes == 6 * LAYOUT.chunk_bytes + 2 * 3 * LAYOUT.block_bytes
    assert (device.take(2), device.take(3)) == ([0, 1], [2, 3, 4])
    device.blocks.zero_()
    device.give_back([3, 1])
    assert device.free_blocks == [1, 3, 5]
    assert device.blocks[:, [1, 3]].isnan().all()
    assert not device.blocks[:, [0, 2, 4, 5]].isnan().any()
    assert device.take(2) == [1, 3]


@pytest.mark.parametrize("resident", [0, 2])
def test_a_sequence_knows_its_room_and_what_to_offload(resident: int) -> None:
    store = host_store(extent=8)
    kv = SequenceKV(LAYOUT, 40, resident, 3, [], store.reserve(8))
    for length in range(40):
        kv.length, kv.streamed = length, max(0, length // 4 - resident)
        assert kv.offload_after(length) == 0
        assert kv.room == min(40, (resident + kv.streamed + 3) * 4) - length
        assert kv.room >= min(40 - length, 4 + 1)
        assert kv.offload_after(length + 5) == max(0, (length + 5) // 4 - max(length // 4, resident))
        for rows in range(1, kv.room + 1):
            touched = (length + rows - 1) // 4 - length // 4 + 1
            assert touched <= kv.span_of(rows)
    kv.length = 9
    assert kv.host_view(1, resident + 2, resident + 4).data_ptr() == store.extents[0].blocks[1, 2].data_ptr()


def test_a_sequence_that_is_all_resident_offloads_nothing() -> None:
    kv = SequenceKV(LAYOUT, 10, 3, 3, [], None, length=9)
    assert (kv.room, kv.offload_after(10), kv.span_of(1), kv.span_of(0)) == (1, 0, 1, 0)
