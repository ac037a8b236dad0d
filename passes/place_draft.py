"""Round graph -> round graph: adds the draft steps, beside the target or after acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specstream.round_graph import Region, RoundGraph, Task, TaskKind
from specstream.round_plan import Lane, lane_of
from specstream.round_spec import RoundSpec
from specstream.round_work import NO_DRAFT, DraftWork

KV = Region("draft_kv")


@dataclass(frozen=True)
class PlaceDraft:
    """Puts the steps where what they are for is known.

    Those for the requests that verify follow acceptance. Those for others, or for what may come of the round, need
    nothing of it: they come before acceptance, and run whenever the target leaves the device to them. No task of the
    target comes to depend on a step.
    """

    draft: DraftWork = NO_DRAFT
    """One step, for its cost."""
    name: str = "place_draft"

    def run(self, ir: RoundGraph) -> RoundGraph:
        accept = next(index for index, task in enumerate(ir.tasks) if task.kind is TaskKind.ACCEPT)
        return ir.insert(accept if ir.spec.drafts_beside else accept + 1, self._steps(ir.spec))

    def check(self, ir: RoundGraph) -> None:
        """Every step is there, in order, and nothing of the target's waits for one."""
        steps = [task.step for task in ir.tasks if task.kind is TaskKind.DRAFT]
        if steps != list(range(ir.spec.draft_steps)):
            raise ValueError(f"draft steps {steps} are not the round's {ir.spec.draft_steps}")
        names = {task.name for task in ir.tasks if task.kind is TaskKind.DRAFT}
        for task in ir.tasks:
            if lane_of(task) is Lane.TARGET and not names.isdisjoint(ir.before[task.name]):
                raise ValueError(f"{task.name} waits for a draft step of its own round")

    def _steps(self, spec: RoundSpec) -> Iterator[Task]:
        known = () if spec.drafts_beside else (Region("outcome"),)
        candidates = Region("other_candidates" if spec.drafts_beside else "candidates")
        rows = self.draft.rows_of(spec)
        for step in range(spec.draft_steps):
            yield Task(
                f"draft/{step}",
                TaskKind.DRAFT,
                reads=(*known, KV, candidates),
                writes=(KV, candidates),
                step=step,
                memory_bytes=self.draft.bytes_of(rows),
                flops=self.draft.flops_of(rows),
                launches=self.draft.launches,
            )
