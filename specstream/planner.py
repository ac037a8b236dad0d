"""Round passes, and the plans they made, kept by structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from specstream.bind import bind
from specstream.cost import DeviceProfile
from specstream.errors import InvalidPlan
from specstream.exposure import exposure
from specstream.graph import PlannableModel
from specstream.passes.assign_lanes import AssignLanes
from specstream.passes.estimate_costs import EstimateCosts
from specstream.passes.expand_fetches import ExpandFetches
from specstream.passes.place_draft import PlaceDraft
from specstream.pieces import Unfinished, in_larger_pieces
from specstream.pipeline import Pass, PassRunner
from specstream.round_graph import TaskKind
from specstream.round_plan import Lane, Plan
from specstream.round_spec import RoundSpec
from specstream.round_work import NO_DRAFT, DraftWork

KEPT_PLANS = 256


def round_passes(
    spec: RoundSpec, profile: DeviceProfile, draft: DraftWork, verified_rows: int = 1, *, prove: bool = True
) -> tuple[Pass, ...]:
    """The passes from the cut model to a plan, in order."""
    return (
        ExpandFetches(spec, verified_rows),  # first: everything later is about the tasks it lists
        PlaceDraft(draft),  # after the target's: it gets the time that they leave
        EstimateCosts(profile),  # before lanes, so that placement can weigh durations
        AssignLanes(prove),  # last: fixes the order and proves it
    )


@dataclass
class Planner:
    """Makes the plan of a round, once for each structure, and proves it, if asked to only afterwards.

    A round may start before its plan is proven; nothing that it computes may be committed before.
    """

    model: PlannableModel
    profile: DeviceProfile
    draft: DraftWork = NO_DRAFT
    """One draft step."""
    verified_rows: int = 1
    """Rows of a verification, at most."""
    num_planned: int = 0
    num_ahead: int = 0
    """Of these, how many were made while a round was computed, which delays nobody."""
    runner: PassRunner | None = None
    """Of the latest plan: what its passes did."""
    _prices: dict[RoundSpec, float] = field(default_factory=dict)
    _plans: OrderedDict[RoundSpec, Plan] = field(default_factory=OrderedDict)
    _unproven: set[RoundSpec] = field(default_factory=set)
    _being_made: Unfinished = field(default_factory=Unfinished)
    _being_proven: Unfinished = field(default_factory=Unfinished)

    def bound(self, spec: RoundSpec) -> Plan:
        """The plan that a round of exactly this structure runs: that of its canonical form, on its own chunks."""
        first = self._passes(spec, prove=True)[:-1]
        plan = self.plan(spec.canonical())
        self.prove(plan)
        return bind(plan, PassRunner("bound", None).run(first, self.model))

    def knows(self, spec: RoundSpec) -> bool:
        """Whether the plan is made."""
        return spec in self._plans

    def plan(self, spec: RoundSpec) -> Plan:
        """The plan of a canonical structure, maybe not proven yet."""
        for _ in self.pieces(spec):
            pass
        self._plans.move_to_end(spec)
        return self._plans[spec]

    def pieces(self, spec: RoundSpec) -> Iterator[None]:
        """Makes the plan, if there is none, some tasks at each step.

        What is left of it when nobody asks for more is done when somebody asks for it again, unless another plan has
        been begun meanwhile.
        """
        if not self.knows(spec):
            yield from self._being_made.pieces(spec, partial(self._make, spec))

    def _make(self, spec: RoundSpec) -> Iterator[None]:
        self.runner = PassRunner(f"round_{self.num_planned:04d}")
        plan = yield from self.runner.pieces(self._passes(spec, prove=False), self.model)
        self.num_planned += 1
        self._unproven.add(spec)
        self._plans[spec] = plan
        if len(self._plans) > KEPT_PLANS:
            forgotten, _ = self._plans.popitem(last=False)
            self._unproven.discard(forgotten)
            self._prices.pop(forgotten, None)

    def prove(self, plan: Plan) -> None:
        """Proves a plan, if that has not been done.

        Raises:
            InvalidPlan: it is wrong; it will be made anew.
        """
        for _ in self.proof(plan):
            pass

    def proof(self, plan: Plan) -> Iterator[None]:
        """The same, some tasks at each step, as `pieces` does it."""
        if plan.spec in self._unproven:
            yield from self._being_proven.pieces(plan.spec, partial(self._prove, plan))

    def _prove(self, plan: Plan) -> Iterator[None]:
        try:
            yield from in_larger_pieces(plan.proof())
        except InvalidPlan:
            del self._plans[plan.spec]
            raise
        self._unproven.discard(plan.spec)
        yield
        if plan.spec in self._plans:
            kept = plan.without_regions()  # many are kept, and the garbage collector looks through all
            _ = kept.by_name, kept.by_kind  # which are wanted between two rounds
            self._plans[plan.spec] = kept

    def exact(self, spec: RoundSpec) -> Plan:
        """A plan for this structure alone, which is not kept: for predictions, since groups need not be full in it."""
        plan: Plan = PassRunner("exact", None).run(self._passes(spec, prove=False), self.model)
        return plan

    def draft_price(self, spec: RoundSpec, enough: float = 0.0) -> float:
        """How much longer such rounds are predicted to take than without their draft steps, as a quotient.

        It is reckoned for the first of all rounds that share a plan.

        Args:
            enough: where it certainly is no more than this, what it is at most will do: reckoning it takes as long as a
                short round does, and the device waits.
        """
        if not spec.draft_steps:
            return 1.0
        if enough and (most := self._most_draft_price(spec)) <= enough:
            return most
        shared = spec.canonical()
        if shared not in self._prices:
            drafts = exposure(self.exact(spec), Lane.DRAFT)
            period = drafts.timeline.period_us
            self._prices[shared] = period / (period - drafts.exposed_us)
        return self._prices[shared]

    def _most_draft_price(self, spec: RoundSpec) -> float:
        """With all drafting exposed, over the least that such a round can take without it."""
        by_kind = self.plan(spec.canonical()).by_kind
        drafts, pieces = (sum(task.cost_us for task in by_kind[kind]) for kind in (TaskKind.DRAFT, TaskKind.PIECE))
        return 1 + drafts / max(pieces, spec.streamed_bytes / self.profile.host_to_device_bytes_per_us)

    def _passes(self, spec: RoundSpec, *, prove: bool) -> tuple[Pass, ...]:
        return round_passes(spec, self.profile, self.draft, self.verified_rows, prove=prove)
