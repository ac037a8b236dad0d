"""IR level 2: a round as a graph of tasks that declare the buffer regions they read and write."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

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


@dataclass(frozen=True)
class Region:
    """The interval [start, stop) of a buffer; two regions conflict if they overlap and one is written."""

    buffer: str
    start: int = 0
    stop: int = 1

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Content:
    """What a region holds, for the proof that a reader finds what it is meant to read."""

    region: Region
    value: str


@dataclass(frozen=True)
class Task:
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
    cost_us: float = 0.0
    """Predicted duration."""

    def __str__(self) -> str:
        reads, writes = (", ".join(map(str, regions)) for regions in (self.reads, self.writes))
        detail = f" {self.run}" if self.run else ""
        return f"{self.name}:{detail} reads ({reads}) writes ({writes})"


@dataclass(frozen=True)
class RoundGraph:
    """Tasks in program order, with edges that say why one must precede the other.

    The networkx DiGraph has the task names as nodes (attribute `task`) and edges with attribute `why`: "data"
    (the second reads what the first wrote) or "reuse" (the second overwrites what the first used).
    """

    spec: RoundSpec
    graph: nx.DiGraph[str]

    @classmethod
    def from_program(cls, spec: RoundSpec, tasks: Iterable[Task]) -> RoundGraph:
        """Builds the edges from the regions of tasks given in an order that is right when run one by one."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        writers: dict[str, list[tuple[Region, str]]] = defaultdict(list)
        readers: dict[str, list[tuple[Region, str]]] = defaultdict(list)
        for task in tasks:
            if task.name in graph:
                raise ValueError(f"two tasks are named {task.name}")
            graph.add_node(task.name, task=task)
            for region in task.reads:
                for _, writer in _overlapping(writers[region.buffer], region):
                    graph.add_edge(writer, task.name, why="data")
            for region in task.writes:
                earlier = _overlapping(writers[region.buffer], region) + _overlapping(readers[region.buffer], region)
                for _, user in earlier:
                    if user != task.name and not graph.has_edge(user, task.name):
                        graph.add_edge(user, task.name, why="reuse")
            for region in task.reads:
                readers[region.buffer].append((region, task.name))
            for region in task.writes:
                writers[region.buffer] = _outside(writers[region.buffer], region) + [(region, task.name)]
                readers[region.buffer] = _outside(readers[region.buffer], region)
        return cls(spec, graph)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks in program order."""
        return tuple(data["task"] for _, data in self.graph.nodes(data=True))

    def with_tasks(self, tasks: Iterable[Task]) -> RoundGraph:
        """The same graph with tasks replaced, matched by name."""
        graph = self.graph.copy()
        for task in tasks:
            graph.nodes[task.name]["task"] = task
        return replace(self, graph=graph)

    def validate(self) -> None:
        """Raises ValueError if the edges form a cycle."""
        if not nx.is_directed_acyclic_graph(self.graph):
            raise ValueError(f"the round graph has a cycle: {nx.find_cycle(self.graph)}")

    def op_counts(self) -> Counter[str]:
        return Counter(task.kind.value for task in self.tasks)

    def to_text(self) -> str:
        lines = [f"# round of {self.spec.num_layers} layers, {len(self.spec.seats)} seats"]
        for task in self.tasks:
            cost = f"  # {task.cost_us:.1f} us" if task.cost_us else ""
            lines.append(f"{task}{cost}")
            for before in self.graph.predecessors(task.name):
                lines.append(f"    after {before} ({self.graph.edges[before, task.name]['why']})")
        return "\n".join(lines) + "\n"


def _overlapping(used: list[tuple[Region, str]], region: Region) -> list[tuple[Region, str]]:
    return [u for u in used if u[0].start < region.stop and region.start < u[0].stop]


def _outside(used: list[tuple[Region, str]], region: Region) -> list[tuple[Region, str]]:
    """Uses that a write of `region` does not wholly cover: later tasks must still be ordered after them."""
    return [u for u in used if not (region.start <= u[0].start and u[0].stop <= region.stop)]
