"""What the tasks of the target lane do, whoever runs them: a piece, or a part of an attention."""

from __future__ import annotations

from torch import Tensor

from specstream.attention import Attention, Rows
from specstream.graph import PartitionedModel
from specstream.round_graph import Task, TaskKind
from specstream.round_spec import RoundSpec


def run_target_task(
    task: Task,
    spec: RoundSpec,
    model: PartitionedModel,
    attention: Attention,
    rows: Rows,
    values: dict[str, Tensor],
    slot: int,
) -> None:
    """Computes a piece, or does what an attention task says.

    Args:
        values: the intermediate values of the round by name; read, extended, and rid of what nobody needs any more.
        slot: the ring slot of a group that is attended to; else not looked at.
    """
    if task.kind is TaskKind.PIECE:
        model.pieces[task.layer].run(values)
        return
    site = model.sites[task.layer]
    if task.kind is TaskKind.APPEND:
        attention.append(task.layer, values.pop(site.key), values.pop(site.value), rows)
    elif task.kind is TaskKind.LOCAL:
        attention.local(task.layer, values[site.query], site.spec, rows)
    elif task.kind is TaskKind.ATTEND:
        run = spec.run_of(task)
        attention.attend(slot, task.group, run, values[site.query], site.spec, rows[run.seat][1])
    else:
        assert task.kind is TaskKind.MERGE
        values[site.out] = attention.merge(values.pop(site.query), site.spec, rows)
