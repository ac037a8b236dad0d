"""Which memory is short, and by how much: the least more with which it fits, all else being as given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specstream.errors import OutOfBudget
from specstream.fit_report import MemoryUse, Shortage
from specstream.fit_setup import UNLIMITED, NotAtOnce, Setup, largest
from specstream.memory import host_budget
from specstream.options import parse_size


@dataclass(frozen=True)
class Enough:
    """What would fit: a setup with more memory, and what is short in the one that was given."""

    setup: Setup
    short: Shortage

    def use(self, given: Setup) -> MemoryUse:
        """With all requests running, beside the memory that there is.

        Args:
            given: the setup that does not fit.
        """
        memory, running = self.setup.rehearsed(self.setup.least_options)
        budget = host_budget(given.options, given.planning.free_host) if given.host_is_known else None
        capacity = given.profile.device_memory_bytes
        return MemoryUse.of(memory, running.tail_blocks, running.host_bytes, capacity, budget)


def enough_memory(setup: Setup) -> Enough | None:
    """What it takes for a setup that does not fit; None if no memory suffices."""
    host = setup.options.host_kv_budget
    larger = _enough_device(setup.changed(host_kv_budget=UNLIMITED))
    if larger is None:
        return None
    given = larger.setup.changed(host_kv_budget=host)
    if given.refusal() is None:
        return replace(larger, setup=given)
    budget = host_budget(setup.options, setup.planning.free_host)
    more = _least_more(lambda more: given.changed(host_kv_budget=budget + more), UNLIMITED)
    if more is None:
        return None
    short = replace(larger.short, host=more)
    return Enough(given.changed(host_kv_budget=budget + more), short)


def _enough_device(setup: Setup) -> Enough | None:
    """With as much of the device as it takes: of a budget for KV if that alone is too small, else of the device."""
    if setup.refusal() is None:
        return Enough(setup, Shortage())
    least, most = _kv_budget(setup), _most_kv(setup)
    more = _least_more(lambda more: setup.changed(gpu_kv_budget=least + more), most - least)
    if more is not None:
        return Enough(setup.changed(gpu_kv_budget=least + more), Shortage(device=more, of_budget=True))
    capacity = setup.profile.device_memory_bytes
    if capacity is None:
        return None
    too_much = setup.options.gpu_kv_budget != "auto" and setup.changed(gpu_kv_budget="auto").refusal() is None

    def on_larger(more: int) -> Setup:
        larger = setup.on_device_of(capacity + more)
        return larger if too_much else larger.changed(gpu_kv_budget=_most_kv(larger))

    more = _least_more(on_larger, UNLIMITED)
    return None if more is None else Enough(on_larger(more), Shortage(device=more))


def _most_kv(setup: Setup) -> int:
    """Bytes of the target's KV that the device has room for, 1 at least."""
    free, planning, options = setup.planning.free_device, setup.planning, setup.least_options
    work = planning.work(options)
    if free is None or work is None:
        return UNLIMITED
    return max(1, free - planning.draft_kv(options) - planning.drawn_from(options) - work.least)


def _kv_budget(setup: Setup) -> int:
    """Bytes of the target's KV that a setup has on the device."""
    given = setup.options.gpu_kv_budget
    if given not in ("auto", "min"):
        return parse_size("gpu_kv_budget", given)
    try:
        return setup.rehearsed(setup.least_options)[0].device_kv
    except NotAtOnce as error:
        return error.memory.device_kv
    except OutOfBudget:
        return 1


def _least_more(at: Callable[[int], Setup], most: int) -> int | None:
    """The least bytes from 1 to `most` with which it fits; None if it does not with the most."""
    too_little = largest(0, most, lambda more: at(more).refusal() is not None)
    return too_little + 1 if too_little < most else None
