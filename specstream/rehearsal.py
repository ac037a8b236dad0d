"""What a memory plan comes to with requests in it: the scheduler admits them to stores on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specstream.kv import DeviceStore, HostStore
from specstream.memory import MemoryPlan
from specstream.scheduler import Scheduler
from specstream.sequence import Sequence

META = torch.device("meta")


@dataclass(frozen=True)
class Rehearsal:
    """Requests of `max_model_len` tokens, as many as run at once."""

    running: int
    tail_blocks: int
    """Device blocks of those that stream, beside their resident chunks."""
    host_bytes: int
    """Allocated for them."""


def rehearse(memory: MemoryPlan, requests: int) -> Rehearsal:
    """Has a scheduler admit so many requests."""
    store = DeviceStore(
        memory.layout,
        memory.num_blocks,
        memory.staging_slots,
        memory.chunks_per_group,
        META,
        False,
        memory.prompt_chunks,
    )
    host = HostStore(memory.layout, memory.host_budget, memory.extent_chunks, device=META)
    scheduler = Scheduler(memory, store, host, requests)
    length = memory.max_model_len
    scheduler.waiting.extend(Sequence(number, length, length, frozenset(), []) for number in range(requests))
    kept = [sequence.kv for sequence in scheduler.admit() if sequence.kv is not None]
    tails = sum(len(kv.blocks) - kv.resident for kv in kept if kv.host is not None)
    return Rehearsal(len(kept), tails, host.allocated_bytes)
