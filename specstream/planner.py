"""Round passes, and the plans they made, kept by structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specstream.bind import bind
from specstream.cost import DeviceProfile
from specstream.errors import InvalidPlan
from specstream.exposure import exposure
from specstream.graph import PlannableModel
from specstream.passes.assign_lanes import AssignLanes
from specstream.passes.estimate_costs import EstimateCosts
from specstream.passes.expand_fetches import ExpandFetches
from specstream.passes.place_draft import PlaceDraft
from specstream.pipeline import Pass, PassRunner
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
    _begun: tuple[RoundSpec, Iterator[Any]] | None = None
    """A plan that is being made, and what is left of that."""

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
        """Makes the plan, if there is none, one pass at each step.

        What is left of it when nobody asks for more is done when somebody asks for it again, unless another plan has
        been begun meanwhile.
        """
        if self.knows(spec):
            return
        rest = self._begun[1] if self._begun is not None and self._begun[0] == spec else self._make(spec)
        self._begun = None  # a pass that fails ends it
        for _ in rest:
            self._begun = spec, rest
            yield
            self._begun = None

    def _make(self, spec: RoundSpec) -> Iterator[Any]:
        self.runner = PassRunner(f"round_{self.num_planned:04d}")
        for ir in self.runner.steps(self._passes(spec, prove=False), self.model):
            yield ir
        self.num_planned += 1
        self._unproven.add(spec)
        self._plans[spec] = ir
        if len(self._plans) > KEPT_PLANS:
            forgotten, _ = self._plans.popitem(last=False)
            self._unproven.discard(forgotten)
            self._prices.pop(forgotten, None)

    def prove(self, plan: Plan) -> None:
        """Proves a plan, if that has not been done.

        Raises:
            InvalidPlan: it is wrong; it will be made anew.
        """
        if plan.spec not in self._unproven:
            return
        try:
            plan.check()
        except InvalidPlan:
            del self._plans[plan.spec]
            raise
        self._unproven.remove(plan.spec)

    def exact(self, spec: RoundSpec) -> Plan:
        """A plan for this structure alone, which is not kept: for predictions, since groups need not be full in it."""
        plan: Plan = PassRunner("exact", None).run(self._passes(spec, prove=False), self.model)
        return plan

    def draft_price(self, spec: RoundSpec) -> float:
        """How much longer such rounds are predicted to take than without their draft steps, as a quotient.

        It is reckoned for the first of all rounds that share a plan.
        """
        if not spec.draft_steps:  # which needs no simulation between two rounds
            return 1.0
        shared = spec.canonical()
        if shared not in self._prices:
            drafts = exposure(self.exact(spec), Lane.DRAFT)
            period = drafts.timeline.period_us
            self._prices[shared] = period / (period - drafts.exposed_us)
        return self._prices[shared]

    def _passes(self, spec: RoundSpec, *, prove: bool) -> tuple[Pass, ...]:
        return round_passes(spec, self.profile, self.draft, self.verified_rows, prove=prove)
