"""Gives every task of a round graph a predicted duration."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.cost import DeviceProfile
from specstream.round_graph import RoundGraph


@dataclass(frozen=True)
class EstimateCosts:
    """Durations from a device profile."""

    profile: DeviceProfile
    name: str = "estimate_costs"

    def run(self, ir: RoundGraph) -> RoundGraph:
        return ir.with_tasks(task._replace(cost_us=self.profile.cost_us(task)) for task in ir.tasks)

    def check(self, ir: RoundGraph) -> None:
        """Every task has a positive cost."""
        if free := [task.name for task in ir.tasks if task.cost_us <= 0]:
            raise ValueError(f"tasks without a cost: {free}")
