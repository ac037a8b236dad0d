"""What a round's plan is run on: the rows of its requests, and what the speculator does with their logits."""

from __future__ import annotations

from collections.abc import Iterator

from specstream.batch import FlatRows, RoundBatch, SeatRows
from specstream.round_spec import RoundSpec
from specstream.scheduler import RequestRows
from specstream.sequence import Sequence
from specstream.speculator import Speculator


def round_batch(
    rows: list[RequestRows],
    drafted: list[RequestRows],
    running: list[Sequence],
    spec: RoundSpec,
    speculator: Speculator,
    work_ahead: Iterator[bool],
    *,
    measured: bool,
) -> RoundBatch:
    """The batch of a round of this structure.

    Args:
        drafted: requests that do not verify, and are drafted for.
        running: all that may be streamed for.
        work_ahead: a piece of work at each step.
        measured: whether it is to be noted when each task ran.
    """
    flat = FlatRows.of((row.tokens, row.kv.length, row.logits) for row in rows)
    beside = drafted if spec.drafts_beside else None
    return RoundBatch(
        flat,
        {row.sequence.seat: SeatRows(row.kv, *place) for row, place in zip(rows, flat.places, strict=True)},
        accept=lambda logits: speculator.accept(rows, logits[0]),
        draft=speculator.draft,
        prepare=lambda: speculator.prepare(rows, beside),
        settle=speculator.settle,
        work_ahead=lambda: next(work_ahead, False),
        others={s.seat: s.kv for s in running if s.kv is not None},
        spans=[] if measured else None,
    )
