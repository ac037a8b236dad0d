"""TensorBoard's own file of a run: figures of each round for its Time Series, the first plan's tasks for its Graphs.

Needs the extra `tensorboard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.versions_pb2 import VersionDef
from tensorboard.summary.writer.record_writer import RecordWriter

from specstream.round_graph import RoundGraph, Task
from specstream.round_plan import Plan, lane_of
from specstream.traces.figures import round_scalars
from specstream.traces.records import PlannedRound, RecordedRound, RunInfo

VERSION = "brain.Event:2"
GROUP = "round"
"""Under which the scalars are listed."""


class EventFile:
    """Written while the run goes on. What an interrupt has left of a record is overwritten by the next one."""

    def __init__(self, folder: Path, info: RunInfo, rounds: int) -> None:
        """Makes the file, `path`.

        Args:
            rounds: of so many rounds all scalars are written; of twice as many of every second one, and so on.

        Raises:
            OSError: it could not be written.
        """
        self._info, self._rounds = info, rounds
        self._started = datetime.fromisoformat(info.started.replace("Z", "+00:00")).timestamp()
        self.path = folder / f"events.out.tfevents.{int(self._started)}.specstream"
        self._state = 0, 0, False
        """Where whole records end, the next round's index, and whether there is a graph. Set together."""
        self.path.touch(exist_ok=False)
        self._append([Event(wall_time=self._started, file_version=VERSION)], *self._state[1:])

    def add_graph(self, plan: Plan) -> None:
        """Writes the graph of a plan's tasks, if there is none yet.

        Raises:
            OSError: it could not be written.
        """
        _, next_index, there = self._state
        if not there:
            graph = task_graph(plan).SerializeToString()
            self._append([Event(wall_time=self._started, graph_def=graph)], next_index, True)

    def add(self, recorded: RecordedRound, plan: PlannedRound) -> None:
        """Writes the scalars of a round, if they are not there already; `plan` is the round's.

        Raises:
            OSError: they could not be written.
        """
        _, next_index, graph = self._state
        if recorded.index >= next_index:
            written = recorded.index % self._stride(recorded.index) == 0
            self._append([self._event(recorded, plan)] if written else [], recorded.index + 1, graph)

    def _stride(self, index: int) -> int:
        """Every which round is written: a run that goes on for long must not fill the disk."""
        return 1 << max(0, (index // self._rounds).bit_length() - 1)

    def _event(self, recorded: RecordedRound, plan: PlannedRound) -> Any:
        scalars = round_scalars(recorded, plan, self._info)
        values = [Summary.Value(tag=f"{GROUP}/{name}", simple_value=value) for name, value in scalars.items()]
        wall_time = self._started + recorded.start_us / 1e6
        return Event(wall_time=wall_time, step=recorded.index, summary=Summary(value=values))

    def _append(self, events: Iterable[Any], next_index: int, graph: bool) -> None:
        packed = BytesIO()
        writer = RecordWriter(packed)
        for event in events:
            writer.write(event.SerializeToString())
        data, end = packed.getvalue(), self._state[0]
        with self.path.open("r+b") as file:
            file.seek(end)
            file.truncate()
            file.write(data)
        self._state = end + len(data), next_index, graph


def task_graph(plan: Plan) -> Any:
    """A plan's tasks as TensorBoard's GraphDef: what a task reads is its input, what it must wait for otherwise a
    control input."""
    graph = RoundGraph.from_program(plan.spec, plan.tasks)
    names = {task.name: node_name(task) for task in graph.tasks}
    nodes = [
        NodeDef(
            name=names[task.name],
            op=task.kind.value,
            device=lane_of(task).value,
            input=_inputs(graph.before[task.name], names),
            attr=dict(_attributes(task)),
        )
        for task in graph.tasks
    ]
    return GraphDef(node=nodes, versions=VersionDef(producer=22))


def node_name(task: Task) -> str:
    """Lane, layer and task: what is before a slash can be folded up."""
    layer = (f"layer_{task.layer}",) if task.layer >= 0 else ()
    return "/".join((lane_of(task).value, *layer, task.name.replace("/", "_")))


def _inputs(before: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    data = [names[earlier] for earlier, why in before.items() if why == "data"]
    return data + [f"^{names[earlier]}" for earlier, why in before.items() if why != "data"]


def _attributes(task: Task) -> Iterator[tuple[str, Any]]:
    yield "task", AttrValue(s=task.name.encode())
    yield "predicted_us", AttrValue(f=task.cost_us)
    for name in ("group", "slot", "step"):
        if (value := getattr(task, name)) >= 0:
            yield name, AttrValue(i=value)
    for name in ("link_bytes", "memory_bytes"):
        if value := getattr(task, name):
            yield name, AttrValue(i=value)
