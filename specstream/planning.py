"""What an engine decides before it allocates anything: its options, its memory, its rounds.

An engine plans its own models by this, and `specstream.plan` models that nobody has loaded, for a device that is not
there: so that what is predicted is what an engine would do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specstream.block_window import BLOCK_TOKENS, BlockWindow
from specstream.cost import DeviceProfile
from specstream.depth import choose_depth
from specstream.draft import Branches, DraftWindow
from specstream.fan_out import ITSELF, SECOND_MODEL, FanOut
from specstream.graph import ModelSpec, PlannableModel
from specstream.idle import idle_bytes
from specstream.kv import ChunkLayout
from specstream.lookahead import branches_of
from specstream.memory import (
    MemoryPlan,
    no_work,
    plan_memory,
    resolve_group,
    resolve_layout,
    resolve_max_model_len,
)
from specstream.options import SELF_WINDOW, Options
from specstream.planner import Planner
from specstream.policy import choose_drafting
from specstream.round_work import NO_DRAFT, DraftWork
from specstream.speculate import DRAWN_FROM_DTYPE
from specstream.work_memory import DraftShape, WorkMemory


@dataclass(frozen=True)
class Planning:
    """Two models, a device, and how much memory is free."""

    target: PlannableModel
    draft: PlannableModel | None
    """The target itself if it drafts for itself."""
    profile: DeviceProfile
    free_device: int | None
    """Bytes, weights loaded, of a device with memory of its own; None where the device is the host."""
    free_host: int | None = None
    """Bytes; None: what the system says."""

    def fan_out(self, options: Options) -> FanOut:
        """How much lookahead foresees."""
        usual, branches = ITSELF if self.draft is self.target else SECOND_MODEL, options.lookahead_branches
        return usual if branches == "auto" else replace(usual, branches=branches)

    def branches(self, options: Options) -> Branches:
        """What is drafted for beside requests, with lookahead."""
        return branches_of(options, self.fan_out(options))

    def draft_work(self, options: Options) -> DraftWork:
        """One draft step."""
        if self.draft is None:
            return NO_DRAFT
        spec, kv = self.draft.spec, kv_seen(self.draft.spec, self.window(options))
        fan_out = self.fan_out(options) if options.drafting == "lookahead" else None
        return DraftWork(self.draft.read_bytes, spec.num_layers, spec.dtype.itemsize, kv, fan_out)

    @property
    def draft_weights(self) -> int:
        """Bytes beside the target's."""
        return 0 if self.draft is None or self.draft is self.target else self.draft.weight_bytes

    def window(self, options: Options) -> DraftWindow:
        longest = resolve_max_model_len(options, self.target.spec)
        return window_of(options, longest, itself=self.draft is self.target)

    def draft_kv(self, options: Options) -> int:
        """Bytes of the drafter's KV."""
        if self.draft is None:
            return 0
        window, own_device = self.window(options), self.free_device is not None
        return draft_kv_bytes(options, self.draft.spec, window, self.fan_out(options), own_device=own_device)

    def drawn_from(self, options: Options) -> int:
        """Bytes of what candidates of requests that sample are drawn from, on a device of its own."""
        if self.draft is None or self.free_device is None or options.rejection_sample_method == "coupled":
            return 0
        seats, depth = options.max_num_seqs, options.most_candidates
        candidates = seats * depth
        if options.drafting == "cohorts":
            candidates += seats * depth
        elif options.drafting == "lookahead":
            candidates += (seats + self.branches(options).count) * (depth + 1)
        return candidates * self.target.spec.vocab_size * DRAWN_FROM_DTYPE.itemsize

    def work(self, options: Options) -> WorkMemory | None:
        """On a device of its own."""
        if self.free_device is None:
            return None
        spec, longest = self.target.spec, resolve_max_model_len(options, self.target.spec)
        layout = resolve_layout(options, spec, own_device=True)
        requests, draft = options.max_num_seqs, None
        if self.draft is not None:
            seats = requests + self.branches(options).count
            draft = DraftShape(self.draft.spec, BlockWindow.of(self.window(options)), seats)
        return WorkMemory(
            spec=spec,
            layout=layout,
            request_tokens=longest,
            requests=requests,
            group_chunks=resolve_group(options, layout, layout.chunks_of(longest), own_device=True),
            verified=-(-requests // 2) if options.drafting == "cohorts" else requests,
            rows_of_seat=options.most_candidates + 1,
            draft=draft,
        )

    def planned(self, options: Options) -> tuple[MemoryPlan, Planner]:
        """The memory plan and the planner of rounds, for options whose policy and number of candidates are settled.

        Raises:
            OutOfBudget: memory that does not suffice.
        """
        memory = self.memory(options)
        return memory, Planner(self.target, self.profile, self.draft_work(options), options.most_candidates + 1)

    def memory(self, options: Options) -> MemoryPlan:
        """As `planned`."""
        work = self.work(options)
        return plan_memory(
            options,
            self.target.spec,
            weights=self.target.weight_bytes,
            draft_weights=self.draft_weights,
            draft_kv=self.draft_kv(options),
            drawn_from=self.drawn_from(options),
            free_host=self.free_host,
            free_device=self.free_device,
            idle_bytes=idle_bytes(options, self.profile, self.draft_work(options)),
            work=no_work if work is None else work.bytes,
        )

    def settled(self, options: Options) -> Options:
        """The options with a policy and a number of candidates in place of "auto".

        Raises:
            OutOfBudget: memory that does not suffice.
        """
        if options.num_speculative_tokens == "auto":
            depth = 1 if self.draft is None else choose_depth(options, self.planned)
            options = replace(options, num_speculative_tokens=depth)
        if options.drafting == "auto" and self.draft is not None:
            options = replace(options, drafting=choose_drafting(options, self.planned)[0])
        return options


def window_of(options: Options, longest: int, *, itself: bool) -> DraftWindow:
    """What a draft of requests of up to `longest` tokens sees, which may be the target itself."""
    window = options.draft_window
    if window == "auto":
        window = SELF_WINDOW if itself else None
    return DraftWindow(longest, window, options.draft_sink)


def kv_seen(draft: ModelSpec, window: DraftWindow) -> int:
    """Bytes of a request's KV that a draft step reads, at most."""
    return window.seen * draft.num_layers * draft.kv_bytes_per_token_layer


def draft_kv_bytes(
    options: Options, draft: ModelSpec, window: DraftWindow, fan_out: FanOut, *, own_device: bool
) -> int:
    """Bytes that a drafter's KV takes: of each request and, with lookahead, each branch."""
    branches = branches_of(options, fan_out)
    if own_device:
        blocks = BlockWindow.of(window).blocks_for(options.max_num_seqs, branches)
        return blocks * ChunkLayout.of(draft, BLOCK_TOKENS).chunk_bytes
    seats = options.max_num_seqs + branches.count
    return seats * window.storage * draft.num_layers * draft.kv_bytes_per_token_layer
