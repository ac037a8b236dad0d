"""Round passes, and the plans they made, kept by structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from specstream.bind import bind
from specstream.cost import DeviceProfile
from specstream.errors import InvalidPlan
from specstream.graph import PartitionedModel
from specstream.passes.assign_lanes import AssignLanes
from specstream.passes.estimate_costs import EstimateCosts
from specstream.passes.expand_fetches import ExpandFetches
from specstream.pipeline import Pass, PassRunner
from specstream.plan import Plan
from specstream.round_spec import RoundSpec

KEPT_PLANS = 256


def round_passes(
    spec: RoundSpec, profile: DeviceProfile, draft_weight_bytes: int, *, prove: bool = True
) -> tuple[Pass, ...]:
    """The passes from the cut model to a plan, in order."""
    return (
        ExpandFetches(spec, draft_weight_bytes),  # first: everything later is about the tasks it lists
        EstimateCosts(profile),  # before lanes, so that placement can weigh durations
        AssignLanes(prove),  # last: fixes the order and proves it
    )


@dataclass
class Planner:
    """Makes the plan of a round, once for each structure, and proves it, if asked to only afterwards.

    A round may start before its plan is proven; nothing that it computes may be committed before.
    """

    model: PartitionedModel
    profile: DeviceProfile
    draft_weight_bytes: int = 0
    num_planned: int = 0
    runner: PassRunner | None = None
    """Of the latest plan: what its passes did."""
    _plans: OrderedDict[RoundSpec, Plan] = field(default_factory=OrderedDict)
    _unproven: list[Plan] = field(default_factory=list)

    def bound(self, spec: RoundSpec) -> Plan:
        """The plan that a round of exactly this structure runs: that of its canonical form, on its own chunks."""
        first = round_passes(spec, self.profile, self.draft_weight_bytes)[:-1]
        plan = self.plan(spec.canonical())
        self.prove()
        return bind(plan, PassRunner("bound", None).run(first, self.model))

    def knows(self, spec: RoundSpec) -> bool:
        """Whether the plan is made."""
        return spec in self._plans

    def plan(self, spec: RoundSpec) -> Plan:
        """The plan of a canonical structure, maybe not proven yet."""
        plan = self._plans.get(spec)
        if plan is None:
            self.runner = PassRunner(f"round_{self.num_planned:04d}")
            self.num_planned += 1
            plan = self.runner.run(round_passes(spec, self.profile, self.draft_weight_bytes, prove=False), self.model)
            self._unproven.append(plan)
            self._plans[spec] = plan
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(spec)
        return plan

    def prove(self) -> None:
        """Proves what has been planned since the last time.

        Raises:
            InvalidPlan: a plan is wrong; it will be made anew.
        """
        while self._unproven:
            plan = self._unproven[-1]
            try:
                plan.check()
            except InvalidPlan:
                self._plans.pop(plan.spec, None)
                self._unproven.pop()
                raise
            self._unproven.pop()
