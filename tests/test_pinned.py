"""Pinned memory in the background, with the driver's part played by the test."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstream import pinned
from specstream.errors import OutOfBudget
from specstream.kv import ChunkLayout, HostStore
from specstream.pinned import Pinning, processors
from specstream.pinned_pool import PinnedPool

LAYOUT = ChunkLayout(num_layers=2, num_kv_heads=1, head_dim=8, chunk_tokens=16, dtype=torch.float32)


class Driver:
    """What of the CUDA runtime is called."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.status = 0
        self.go = threading.Event()
        self.go.set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.go.wait(10)
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(pinned, "_runtime", lambda: made)
    monkeypatch.setattr(pinned, "_stay_near", lambda device: None)
    yield made
    gc.collect()  # what the test has left is released while this driver is there


def store(extents: int = 2, pool: PinnedPool | None = None, extent_chunks: int = 4) -> HostStore:
    budget = extents * extent_chunks * LAYOUT.chunk_bytes
    return HostStore(LAYOUT, budget, extent_chunks, pinned_for=torch.device("cuda"), pool=pool)


def test_exactly_sized_and_released_with_the_last_view(driver: Driver) -> None:
    memory = Pinning((3, 5, 7), torch.float16, torch.device("cuda")).wait()
    assert memory.shape == (3, 5, 7)
    assert memory.dtype == torch.float16
    assert driver.registered == {memory.data_ptr(): 210}
    view = memory[1]
    del memory
    gc.collect()
    assert driver.registered
    del view
    gc.collect()
    assert not driver.registered


def test_progress_counts_bytes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "SLICE_BYTES", 100)
    pinning = Pinning((250,), torch.uint8, torch.device("cuda"))
    pinning.wait()
    assert pinning.present_bytes == pinning.total_bytes == 250


def test_the_first_extent_comes_in_the_background(driver: Driver) -> None:
    driver.go.clear()
    host = store()
    host.prepare()
    host.prepare()  # which is under way
    assert host.allocated_bytes == 0
    driver.go.set()
    assert host.reserve(3) is not None
    assert len(driver.registered) == 1
    assert host.reserve(4) is not None  # another, asked for only now
    assert len(driver.registered) == 2
    assert host.reserve(4) is None
    host.close()


def test_a_refusal_is_told_and_the_next_attempt_is_a_new_one(driver: Driver) -> None:
    host = store()
    driver.status = 2
    host.prepare()
    with pytest.raises(OutOfBudget, match=r"does not pin 8\.00 KiB of host memory"):
        host.reserve(1)
    driver.status = 0
    assert host.reserve(1) is not None


def test_an_interrupt_while_waiting_leaves_it_under_way(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    host = store()
    wait = Pinning.wait

    def interrupt(self: Pinning) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pinning, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        host.reserve(1)
    monkeypatch.setattr(Pinning, "wait", wait)
    assert host.reserve(1) is not None
    assert len(driver.registered) == 1


def test_closing_gives_up_what_is_under_way(driver: Driver) -> None:
    driver.go.clear()
    host = store()
    host.prepare()
    host.close()
    driver.go.set()
    for thread in threading.enumerate():
        if thread.name == "specstream-pinning":
            thread.join()
    gc.collect()
    assert not driver.registered


def test_lists_of_processors() -> None:
    assert processors("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert processors("5") == {5}


def test_threads_stay_near_the_device_if_the_system_says_where_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0xFFFF, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    pinned._stay_near(torch.device("cuda"))  # of a device that nobody knows: nothing happens


def test_what_a_closed_store_leaves_the_next_one_has(driver: Driver) -> None:
    pool = PinnedPool()
    first = store(2, pool)
    assert first.reserve(4) is not None
    assert first.reserve(4) is not None
    first.close()
    registered = dict(driver.registered)
    assert len(registered) == 2
    assert pool.total_bytes == sum(registered.values()) == 8 * LAYOUT.chunk_bytes

    second = store(2, pool, extent_chunks=3)  # of two, somewhat smaller
    second.prepare()  # there is nothing to do
    for _ in range(2):
        run = second.reserve(3)
        assert run is not None
        run.extent.blocks.fill_(7.0)  # whoever writes, and in whatever mode
        assert run.extent.blocks.data_ptr() in registered
    assert driver.registered == registered
    assert pool.total_bytes == 0
    with torch.inference_mode():
        second.close()
    assert pool.total_bytes == 8 * LAYOUT.chunk_bytes  # whole again
    assert not any(piece.is_inference() for piece in pool.pieces)
    del second, run
    pool.pieces.clear()
    gc.collect()
    assert not driver.registered


def test_pinned_memory_that_is_too_small_does_not_pile_up(driver: Driver) -> None:
    pool = PinnedPool()
    for extent_chunks in (2, 3, 4, 3, 2):
        host = store(2, pool, extent_chunks)
        host.prepare()
        assert host.reserve(extent_chunks) is not None
        assert host.reserve(extent_chunks) is not None
        assert len(driver.registered) == 2
        host.close()
        gc.collect()
    assert list(driver.registered.values()) == [4 * LAYOUT.chunk_bytes] * 2


def test_memory_that_is_not_pinned_is_released() -> None:
    pool = PinnedPool()
    host = HostStore(LAYOUT, 4 * LAYOUT.chunk_bytes, 4, pool=pool)
    assert host.reserve(4) is not None
    host.close()
    assert pool.total_bytes == 0


def test_the_smallest_piece_that_suffices_is_taken() -> None:
    pool = PinnedPool()
    for size in (30, 10, 20):
        pool.keep(torch.empty(size, dtype=torch.uint8))
    taken = pool.take(11)
    assert taken is not None
    assert taken.nbytes == 11
    assert sorted(piece.nbytes for piece in pool.pieces) == [10, 30]
    assert pool.holds(30)
    assert not pool.holds(31)
    assert pool.take(31) is None
    pool.release_one()
    assert [piece.nbytes for piece in pool.pieces] == [30]
