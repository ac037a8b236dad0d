"""IR level 2: a round as a graph of tasks that declare the buffer regions they read and write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import networkx as nx

from specstream.round_spec import ChunkRun, RoundSpec


class TaskKind(str, Enum):
    """What a task does."""

    PIECE = "piece"
    """The model between two attentions."""
    APPEND = "append"
    """Writes the K and V of the round's rows into their device chunks."""
    LOCAL = "local"
    """Attends to everything on the device: resident chunks, tail, candidates."""
    FETCH = "fetch"
    """Copies one group from the host into a ring slot."""
    ATTEND = "attend"
    """Attends to one ring slot and merges into the layer's state."""
    MERGE = "merge"
    """Turns the layer's state into the attention's output."""
    OFFLOAD = "offload"
    """Copies full committed chunks of one layer to the host."""
    ACCEPT = "accept"
    """Compares the candidates with the target's own choices and commits."""
    DRAFT = "draft"
    """One step of the draft."""


class Region(NamedTuple):
    """The interval [start, stop) of a buffer; two regions conflict if they overlap and one is written."""

    buffer: str
    start: int = 0
    stop: int = 1

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


class Content(NamedTuple):
    """What each unit of a region holds, for the proof that a reader finds what it is meant to read."""

    region: Region
    value: str


IN_PLACE = "the chunk of that number"
"""The content of a unit of a buffer that has a place for each chunk: the host's, the device's while resident."""


class Task(NamedTuple):
    """A unit of work on one lane."""

    name: str
    kind: TaskKind
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    expects: tuple[Content, ...] = ()
    """What it must find where it reads."""
    leaves: tuple[Content, ...] = ()
    """What it leaves where it writes."""
    layer: int = -1
    run: ChunkRun | None = None
    """The chunks a fetch, attend or offload is about."""
    group: int = -1
    """Which of the layer's groups a fetch or attend is about: of the round's, or of the next one's if it is ahead."""
    place: int = -1
    """Which of the round's seats an offload is about, in their order."""
    slot: int = -1
    """Ring slot, counted from the round's first fetch."""
    phase: str = "now"
    """When a fetch is launched: "before" (by the round before), "now", or "ahead" (now, for the next round)."""
    step: int = -1
    """Which draft step."""
    link_bytes: int = 0
    """Bytes over the link, either way."""
    memory_bytes: int = 0
    """Bytes read from device memory."""
    flops: int = 0
    """Floating-point operations, about."""
    launches: int = 1
    """How often the fixed cost of small kernels is counted."""
    cost_us: float = 0.0
    """Predicted duration."""

    def has_work(self, spec: RoundSpec) -> bool:
        """Whether it is a task of this round: the canonical plan may write out where the round has nothing to."""
        return self.kind is not TaskKind.OFFLOAD or spec.run_of(self).count > 0

    def __str__(self) -> str:
        reads, writes = (", ".join(map(str, regions)) for regions in (self.reads, self.writes))
        detail = f" {self.run}" if self.run else ""
        return f"{self.name}:{detail} reads ({reads}) writes ({writes})"


Why = str
"""Why one task must precede another: "data" (it reads what the other wrote) or "reuse" (it overwrites what it used)."""


@dataclass(frozen=True)
class RoundGraph:
    """Tasks in program order, and for each by name the tasks that must precede it, with the reason."""

    spec: RoundSpec
    tasks: tuple[Task, ...]
    before: dict[str, dict[str, Why]]

    @classmethod
    def from_program(cls, spec: RoundSpec, program: Iterable[Task]) -> RoundGraph:
        """Builds the edges from the regions of tasks given in an order that is right when run one by one."""
        builder = GraphBuilder(spec)
        for task in program:
            builder.add(task)
        return builder.graph()

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """The same as a networkx DiGraph of the task names: nodes have an attribute `task`, edges `why`."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((task.name, {"task": task}) for task in self.tasks)
        for name, edges in self.before.items():
            graph.add_edges_from((earlier, name, {"why": why}) for earlier, why in edges.items())
        return graph

    def with_tasks(self, tasks: Iterable[Task]) -> RoundGraph:
        """The same graph with its tasks replaced, in the same order, by others of the same names."""
        return replace(self, tasks=tuple(tasks))

    def insert(self, index: int, program: Iterable[Task]) -> RoundGraph:
        """The same graph with more tasks before task `index`, in an order that is right when all run one by one."""
        more = tuple(program)
        tasks = (*self.tasks[:index], *more, *self.tasks[index:])
        buffers = {region.buffer for task in more for region in (*task.reads, *task.writes)}
        concerned = [task for task in tasks if not buffers.isdisjoint(r.buffer for r in (*task.reads, *task.writes))]
        edges = RoundGraph.from_program(self.spec, concerned).before
        before = {task.name: self.before.get(task.name, {}) | edges.get(task.name, {}) for task in tasks}
        return RoundGraph(self.spec, tasks, before)

    def validate(self) -> None:
        """Raises ValueError if the edges form a cycle."""
        place = {task.name: index for index, task in enumerate(self.tasks)}
        forward = all(place[earlier] < place[name] for name, edges in self.before.items() for earlier in edges)
        if not forward and not nx.is_directed_acyclic_graph(self.graph):
            raise ValueError(f"the round graph has a cycle: {nx.find_cycle(self.graph)}")

    def op_counts(self) -> Counter[str]:
        return count_kinds(self.tasks)

    def to_text(self) -> str:
        lines = [f"# round of {self.spec.num_layers} layers, {len(self.spec.seats)} seats"]
        for task in self.tasks:
            cost = f"  # {task.cost_us:.1f} us" if task.cost_us else ""
            lines.append(f"{task}{cost}")
            lines += [f"    after {earlier} ({why})" for earlier, why in self.before[task.name].items()]
        return "\n".join(lines) + "\n"


_Use = tuple[int, int, str]
"""The interval [start, stop) of a buffer, and the task that reads or writes it."""


@dataclass
class GraphBuilder:
    """A round graph that grows task by task."""

    spec: RoundSpec
    _tasks: list[Task] = field(default_factory=list, init=False)
    _before: dict[str, dict[str, Why]] = field(default_factory=dict, init=False)
    _writers: dict[str, list[_Use]] = field(default_factory=lambda: defaultdict(list), init=False)
    _readers: dict[str, list[_Use]] = field(default_factory=lambda: defaultdict(list), init=False)

    def add(self, task: Task) -> None:
        """Adds the next task, in an order that is right when they run one by one."""
        name, writers, readers = task.name, self._writers, self._readers
        if name in self._before:
            raise ValueError(f"two tasks are named {name}")
        self._tasks.append(task)
        edges = self._before[name] = {}
        for region in task.reads:
            for writer in _overlapping(writers[region.buffer], region):
                edges[writer] = "data"
        for region in task.writes:
            for uses in (writers, readers):
                for user in _overlapping(uses[region.buffer], region):
                    edges.setdefault(user, "reuse")
        for region in task.reads:
            readers[region.buffer].append((region.start, region.stop, name))
        for region in task.writes:
            writers[region.buffer] = _outside(writers[region.buffer], region)
            writers[region.buffer].append((region.start, region.stop, name))
            readers[region.buffer] = _outside(readers[region.buffer], region)

    def graph(self) -> RoundGraph:
        """Of the tasks so far."""
        return RoundGraph(self.spec, tuple(self._tasks), self._before)


def count_kinds(tasks: Iterable[Task]) -> Counter[str]:
    """How many tasks there are of each kind."""
    return Counter({kind.value: count for kind, count in Counter(task.kind for task in tasks).items()})


def _overlapping(uses: list[_Use], region: Region) -> list[str]:
    _, first, end = region
    return [name for start, stop, name in uses if start < end and first < stop] if uses else []


def _outside(uses: list[_Use], region: Region) -> list[_Use]:
    """Uses that a write of `region` does not wholly cover: later tasks must still be ordered after them."""
    _, first, end = region
    return [use for use in uses if not (first <= use[0] and use[1] <= end)]
