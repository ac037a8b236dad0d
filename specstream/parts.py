"""What an engine is made of, from models that are captured: its memory, its lanes, who drafts."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import psutil
import torch

from specstream.caller import warn_caller
from specstream.depth import depths_of
from specstream.draft import Branches, Drafter, DraftWindow
from specstream.errors import InvalidOption, OutOfBudget
from specstream.executor import CpuExecutor, Executor
from specstream.fan_out import FanOut
from specstream.graph import ModelSpec, PartitionedModel
from specstream.kv import DeviceStore, HostStore
from specstream.lane_streams import LaneStreams
from specstream.lookahead import Lookahead
from specstream.memory import MemoryPlan, resolve_max_model_len
from specstream.options import Options
from specstream.pinned_pool import PinnedPool
from specstream.planner import Planner
from specstream.planning import Planning
from specstream.profiles import device_profile
from specstream.speculate import Speculation
from specstream.speculator import Speculator
from specstream.tuned_cache import stored_tuned
from specstream.tuned_settings import TunedSettings

DEVICES = ("cpu", "cuda")
"""Kinds of devices that there is an executor for."""


@dataclass(frozen=True)
class EngineParts:
    """All that depends on options: tuning makes it anew."""

    target: PartitionedModel
    draft: PartitionedModel | None
    requested: Options
    """As they were asked for."""
    options: Options
    """The same with a policy and a number of candidates in place of "auto"."""
    memory: MemoryPlan
    planner: Planner
    executor: Executor
    host: HostStore
    speculator: Speculator
    streams: LaneStreams | None
    """None on the CPU."""

    @property
    def by_turns(self) -> bool:
        """Whether requests verify in two cohorts."""
        return self.options.drafting == "cohorts" and self.draft is not None

    def close(self) -> None:
        """Ends the threads and frees all KV memory, whoever still holds the parts. Closing twice does nothing."""
        self.executor.close()
        self.host.close()
        self.speculator.close()
        self.executor.store.close()
        if self.streams is not None:
            gc.unfreeze()


def make_parts(
    requested: Options,
    target: PartitionedModel,
    draft: PartitionedModel | None,
    tuned: TunedSettings | None = None,
    streams: LaneStreams | None = None,
    pool: PinnedPool | None = None,
) -> EngineParts:
    """Plans memory, allocates it, starts the lanes.

    Args:
        tuned: for options that say "auto"; None: what is stored for such an engine, if anything is.
        streams: those of parts that were closed; None: new ones.
        pool: pinned memory of such parts, to which it returns when these are closed; None: it is pinned anew.

    Raises:
        InvalidOption: two models that do not go together.
        OutOfBudget: memory that does not suffice.
    """
    device, on_cuda = target.spec.device, target.spec.device.type == "cuda"
    if on_cuda:
        gc.unfreeze()
        gc.collect()  # what nobody closed, before it is asked how much memory is left
    planning = planning_of(requested, target, draft, pool)
    adapts = requested.num_speculative_tokens == "auto" and draft is not None
    options = _settled(requested, planning, tuned or stored_tuned(requested, target, draft))
    memory, planner = planning.planned(options)
    store = DeviceStore(
        memory.layout,
        memory.num_blocks,
        memory.staging_slots,
        memory.chunks_per_group,
        target.spec.device,
        options.debug,
        memory.prompt_chunks,
    )
    streams, pinned_for = streams or LaneStreams.on(device), device if on_cuda else None
    host = HostStore(memory.layout, memory.host_budget, memory.extent_chunks, options.debug, pinned_for, pool=pool)
    if memory.streams:
        host.prepare()
    drafter = None
    if draft is not None:
        branches, window = planning.branches(options), planning.window(options)
        drafter = _drafter(draft, window, target.spec.vocab_size, options.max_num_seqs, branches, streams)
    speculator = _speculator(options, target, drafter, planning.fan_out(options), streams)
    speculator.depths = depths_of(options, memory, planner) if adapts else None
    executor = _executor(target, store, memory, options, streams)
    if on_cuda:
        gc.freeze()  # to look through all that was captured and compiled takes longer than a round
    return EngineParts(target, draft, requested, options, memory, planner, executor, host, speculator, streams)


def _settled(requested: Options, planning: Planning, tuned: TunedSettings | None) -> Options:
    """Options without "auto" in a policy or a number of candidates: as tuned, if that fits."""
    if tuned is not None:
        options = tuned.given_to(requested)
        try:
            planning.memory(options)
        except OutOfBudget as error:
            warn_caller(f"tuned settings ({tuned}) do not fit now, automatic ones are used: {error}")
        else:
            return options
    return planning.settled(requested)


def planning_of(
    options: Options, target: PartitionedModel, draft: PartitionedModel | None, pool: PinnedPool | None = None
) -> Planning:
    """What an engine of these models decides by: with the memory that is free now, and with what is in the pool.

    Raises:
        InvalidOption: two models that do not go together.
    """
    device = target.spec.device
    if device.type not in DEVICES:
        raise InvalidOption("target", f"a model on {device}", f"a model on {' or '.join(DEVICES)}", "Move it there.")
    if draft is not None:
        _check_pair(target.spec, draft.spec, resolve_max_model_len(options, target.spec))
    free = _free_on(device) if device.type == "cuda" else None
    free_host = None if pool is None else psutil.virtual_memory().available + pool.total_bytes
    return Planning(target, draft, device_profile(device), free, free_host)


def _free_on(device: torch.device) -> int:
    """Bytes that tensors can still take on a CUDA device: what nobody has or torch keeps unused, up to torch's cap."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + torch.cuda.memory_reserved(device) - used, cap - used))


def _executor(
    target: PartitionedModel, store: DeviceStore, memory: MemoryPlan, options: Options, streams: LaneStreams | None
) -> Executor:
    if streams is None:
        return CpuExecutor(target, store)
    from specstream.cuda_executor import CudaExecutor  # needs Triton, which a machine without a device may not have

    most_blocks = memory.layout.chunks_of(memory.max_model_len) + memory.tail_slots
    executor = CudaExecutor(target, store, min(memory.num_blocks, most_blocks), streams)
    executor.load_kernels(options.max_num_seqs, options.most_candidates + 1)
    return executor


def _speculator(
    options: Options, model: PartitionedModel, drafter: Drafter | None, fan_out: FanOut, streams: LaneStreams | None
) -> Speculator:
    speculation, lookahead, target = Speculation.of(options), None, model.spec
    if options.drafting == "lookahead" and drafter is not None:
        lookahead = Lookahead(drafter, options.max_num_seqs, options.most_candidates, fan_out)
    if streams is None:
        return Speculator(speculation, drafter, options.most_candidates, None, lookahead)
    from specstream.cuda_draft import CudaDrafter
    from specstream.device_rounds import DeviceRounds
    from specstream.kernels.process import MAX_VOCAB

    if target.vocab_size > MAX_VOCAB:
        return Speculator(speculation, drafter, options.most_candidates, None, lookahead)
    assert drafter is None or isinstance(drafter, CudaDrafter)
    depth, seats = options.most_candidates, options.max_num_seqs
    beside = options.drafting in ("cohorts", "lookahead")
    kernels = DeviceRounds(speculation, drafter, depth, seats, target.vocab_size, target.device, beside)
    kernels.load_kernels(target.dtype, streams.draft_steps)
    return Speculator(speculation, drafter, depth, kernels, lookahead)


def _drafter(
    model: PartitionedModel,
    window: DraftWindow,
    vocab_size: int,
    max_seats: int,
    branches: Branches,
    streams: LaneStreams | None,
) -> Drafter:
    if streams is None:
        return Drafter(model, window, vocab_size, max_seats, branches)
    from specstream.cuda_draft import CudaDrafter

    return CudaDrafter(model, window, vocab_size, max_seats, branches, streams.draft_steps)


def _check_pair(target: ModelSpec, draft: ModelSpec, max_len: int) -> None:
    if draft.device != target.device:
        raise InvalidOption("draft", f"on {draft.device}", f"on the target's device, {target.device}")
    if draft.max_positions is not None and draft.max_positions < max_len:
        warn_caller(
            f"the draft, {draft.name}, covers {draft.max_positions} positions and max_model_len is {max_len}: "
            f"beyond {draft.max_positions} tokens nothing is drafted"
        )
