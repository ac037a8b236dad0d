"""IR level 3: the plan, an ordered list of launches, event records and waits on lanes, which executors interpret."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from specstream.errors import InvalidPlan
from specstream.pieces import Pieces, finish
from specstream.round_graph import Content, Region, Task, TaskKind, count_kinds
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec


class Lane(str, Enum):
    """An in-order queue of work; under CUDA, a stream."""

    TARGET = "target"
    LINK = "link"
    STORE = "store"
    DRAFT = "draft"


LANE_OF_KIND = {TaskKind.FETCH: Lane.LINK, TaskKind.OFFLOAD: Lane.STORE, TaskKind.DRAFT: Lane.DRAFT}
"""Where a task runs; what is not named runs on the target lane."""


def lane_of(task: Task) -> Lane:
    return LANE_OF_KIND.get(task.kind, Lane.TARGET)


class StepOp(str, Enum):
    """What a step of a plan does."""

    LAUNCH = "launch"
    """Puts a task on its lane."""
    RECORD = "record"
    """Marks, on the lane, the moment the task before it is done. The event has the task's name."""
    WAIT = "wait"
    """Holds the lane until the event has happened."""
    SYNC = "sync"
    """Holds the host until the lane is empty; the round ends with these."""


class Step(NamedTuple):
    """One instruction to a lane; `name` is a task or, for records and waits, the task whose end is meant."""

    op: StepOp
    lane: Lane
    name: str = ""

    def __str__(self) -> str:
        return f"{self.lane.value:<6} {self.op.value:<6} {self.name}".rstrip()


@dataclass(frozen=True)
class Plan:
    """One round as executors run it.

    Entry state: the first `spec.in_flight` fetches, with phase "before", have been launched by the round before, which
    called them `ahead/...`, and their events carry over. What else it has fetched ahead is dropped: its slots are
    filled anew. Exit state: the tasks with phase "ahead".
    """

    spec: RoundSpec
    tasks: tuple[Task, ...]
    steps: tuple[Step, ...]

    @cached_property
    def by_name(self) -> dict[str, Task]:
        return {task.name: task for task in self.tasks}

    @cached_property
    def by_kind(self) -> dict[TaskKind, tuple[Task, ...]]:
        return {kind: tuple(task for task in self.tasks if task.kind is kind) for kind in TaskKind}

    def check(self, following: Plan | None = None) -> None:
        """Proves the plan correct over two rounds: this one and `following` (default: this one again, if it can).

        Raises:
            InvalidPlan: with the tasks and the region or event at fault.
        """
        finish(self.proof(following))

    def proof(self, following: Plan | None = None) -> Pieces[None]:
        """The same in pieces."""
        from specstream.check import prove_rounds

        if following is None and self.spec.entry == self.spec.exit:
            following = self
        return prove_rounds([self] if following is None else [self, following])

    def without_regions(self) -> Plan:
        """The plan as executors need it, which cannot be proven any more: regions are most of what it holds."""
        return replace(self, tasks=tuple(t._replace(reads=(), writes=(), expects=(), leaves=()) for t in self.tasks))

    def validate(self) -> None:
        """Raises InvalidPlan unless every task is launched once and steps name known tasks."""
        launched = Counter(s.name for s in self.steps if s.op is StepOp.LAUNCH)
        expected = Counter(t.name for t in self.tasks if t.phase != "before")
        if launched != expected:
            difference = sorted(((launched - expected) | (expected - launched)).keys())
            raise InvalidPlan(f"tasks are not launched exactly once: {', '.join(difference)}")
        unknown = {s.name for s in self.steps if s.op is not StepOp.SYNC} - self.by_name.keys()
        if unknown:
            raise InvalidPlan(f"steps name unknown tasks: {', '.join(sorted(unknown))}")

    def op_counts(self) -> Counter[str]:
        steps = Counter(step.op for step in self.steps)
        return count_kinds(self.tasks) + Counter({op.value: count for op, count in steps.items()})

    def to_text(self) -> str:
        return "".join(f"{step}\n" for step in self.steps)

    def __str__(self) -> str:
        from specstream.traces.text import describe_plan

        return describe_plan(self)

    def to_json(self) -> str:
        """The whole plan as JSON; `from_json` gives it back equal."""
        parts = {"tasks": [task._asdict() for task in self.tasks], "steps": [step._asdict() for step in self.steps]}
        return json.dumps({"spec": self.spec, **parts}, default=asdict)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what `to_json` wrote.

        Raises:
            InvalidPlan: the text is no plan.
        """
        try:
            data = json.loads(text)
            spec = dict(data["spec"], seats=tuple(SeatSpec(**seat) for seat in data["spec"]["seats"]))
            if spec["next_runs"] is not None:
                spec["next_runs"] = tuple(ChunkRun(**run) for run in spec["next_runs"])
            steps = tuple(Step(StepOp(s["op"]), Lane(s["lane"]), s["name"]) for s in data["steps"])
            return cls(RoundSpec(**spec), tuple(map(_task_from_data, data["tasks"])), steps)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidPlan(f"not a plan in JSON: {error!r}") from error


def _task_from_data(data: dict[str, Any]) -> Task:
    def regions(items: Any) -> tuple[Region, ...]:
        return tuple(Region(*region) for region in items)

    def contents(items: Any) -> tuple[Content, ...]:
        return tuple(Content(Region(*region), value) for region, value in items)

    return Task(
        **data
        | {
            "kind": TaskKind(data["kind"]),
            "reads": regions(data["reads"]),
            "writes": regions(data["writes"]),
            "expects": contents(data["expects"]),
            "leaves": contents(data["leaves"]),
            "run": ChunkRun(**data["run"]) if data["run"] else None,
        }
    )
