"""What the tasks of a round compute, against sums made by hand on the toy model: 4 heads of 5, five tokens a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from specstream.fan_out import FanOut
from specstream.graph import PartitionedModel, Piece
from specstream.options import SELF_WINDOW, Options
from specstream.passes.expand_fetches import ExpandFetches
from specstream.passes.place_draft import PlaceDraft
from specstream.planning import Planning
from specstream.policy import usual_round
from specstream.profiles import H200
from specstream.round_graph import Task
from specstream.round_spec import SeatSpec
from specstream.round_work import FEW_ROWS, MANY_ROWS_SHARE, NO_DRAFT, DraftWork, RoundWork
from tests.architectures import build
from tests.helpers import captured
from tests.toy import round_spec, seat, toy_model

PAIR = 2 * 2 * 4 * 5
"""Operations of one row and one key."""
PROMPT = SeatSpec(1, 0, 3, streamed=2, offload=4, open=2, span=4, buffer_start=0)
RESIDENT_PROMPT = SeatSpec(2, 9, 1, streamed=0, offload=0, open=0, span=5)
"""21 tokens: it is given a fifth chunk wherever it starts."""


def work(*seats: SeatSpec, verified_rows: int = 3) -> RoundWork:
    return RoundWork(round_spec(*seats), toy_model(2).spec, verified_rows)


def tasks(*seats: SeatSpec, draft: DraftWork = NO_DRAFT) -> dict[str, Task]:
    graph = ExpandFetches(round_spec(*seats), 3).run(toy_model(2))
    return {task.name: task for task in PlaceDraft(draft).run(graph).tasks}


def test_rows_of_verifications_and_of_parts_of_prompts() -> None:
    mixed = work(seat(), PROMPT, RESIDENT_PROMPT)
    assert mixed.chunk_tokens == 5
    assert mixed.rows == {0: 3, 1: 20, 2: 20}
    assert mixed.logit_rows == 3 + 1 + 1


@pytest.mark.parametrize(("verified_rows", "span"), [(1, 1), (2, 2), (6, 2), (7, 3)])
def test_a_verification_is_known_by_its_span(verified_rows: int, span: int) -> None:
    one = SeatSpec(0, 9, 1, streamed=0, offload=0, open=0, span=span)
    assert work(one, verified_rows=verified_rows).rows == {0: verified_rows}
    longer = SeatSpec(0, 9, 1, streamed=0, offload=0, open=0, span=span + 1)
    assert work(longer, verified_rows=verified_rows).rows == {0: span * 5}


def test_pieces_count_each_weight_for_each_row_and_the_last_one_for_each_row_with_logits() -> None:
    mixed = work(seat(), PROMPT)
    assert mixed.piece(0, 100) == mixed.piece(1, 100) == 2 * 50 * 23
    assert mixed.piece(2, 100) == 2 * 50 * 4


def test_attention_counts_each_key_for_each_row_and_half_of_the_keys_of_the_rows_themselves() -> None:
    planned = tasks(seat(streamed=3), PROMPT)
    assert planned["attend/0/0"].flops == PAIR * 3 * 10  # two chunks of the verification
    assert planned["attend/1/1"].flops == PAIR * 3 * 5
    assert planned["attend/0/2"].flops == PAIR * 20 * 10
    assert planned["local/0"].flops == PAIR * (3 * 3 + 20 * 10)  # of one chunk, and of four in the prompt buffer


def test_draft_steps_count_a_row_of_each_request() -> None:
    planned = tasks(seat(), seat(1), draft=DraftWork(100, 2))
    assert planned["draft/1"].flops == 2 * 50 * 2


def test_a_draft_step_reads_weights_once_and_the_keys_of_each_request() -> None:
    work = DraftWork(100, 2, kv_bytes=7)
    for seats in ((seat(),), (seat(), seat(1))):
        assert tasks(*seats, draft=work)["draft/0"].memory_bytes == 100 + 7 * len(seats)


def test_a_step_of_many_rows_reads_for_longer_than_a_copy() -> None:
    """Branches are drafted for beside a verification; after it, the requests are whose outcome had none."""
    draft, after = DraftWork(1000, 2, kv_bytes=10, fan_out=FanOut(FEW_ROWS + 4, ())), round_spec(seat())
    assert draft.rows_of(after) == 1
    assert draft.rows_of(replace(after, drafts_beside=True)) == FEW_ROWS + 4
    assert draft.bytes_of(FEW_ROWS) == 1000 + 10 * FEW_ROWS
    assert draft.bytes_of(FEW_ROWS + 4) == int((1000 + 10 * (FEW_ROWS + 4)) / MANY_ROWS_SHARE)


def test_lookahead_drafts_once_more_than_there_are_candidates() -> None:
    options = Options(max_model_len=512, max_num_seqs=1, num_speculative_tokens=3, gpu_kv_budget="min")
    target = captured(build("qwen3", num_hidden_layers=2, max_position_embeddings=512))
    ahead, behind = replace(options, drafting="lookahead"), replace(options, drafting="sequential")
    for settled, steps in ((ahead, 4), (behind, 3)):
        memory, _ = Planning(target, target, H200, 1 << 40).planned(settled)
        assert usual_round(settled, memory).draft_steps == steps


def test_keys_that_a_draft_reads_are_those_of_its_window() -> None:
    target, draft = (
        captured(build("qwen3", num_hidden_layers=layers, max_position_embeddings=4096)) for layers in (2, 1)
    )
    token = draft.spec.kv_bytes_per_token_layer

    def read(drafter: PartitionedModel, window: int | Literal["auto"] | None) -> int:
        options = Options(max_model_len=4096, draft_window=window)
        return Planning(target, drafter, H200, 1 << 40).draft_work(options).kv_bytes

    assert [read(draft, window) for window in (None, 100, 5000, "auto")] == [
        seen * token for seen in (4096, 104, 4096, 4096)
    ]
    assert read(target, "auto") == (SELF_WINDOW + 4) * 2 * token


def test_all_tasks_of_the_link_compute_nothing() -> None:
    planned = tasks(seat(offload=1), PROMPT)
    assert {task.flops for task in planned.values() if task.link_bytes} == {0}


class Embedder(nn.Module):
    """A table of 10 rows of 4, and an output head that may be the same table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10, 4))
        self.head = self.table if tied else nn.Parameter(torch.zeros(10, 4))

    def forward(self, ids: Any) -> Any:
        return F.linear(F.embedding(ids, self.table), self.head)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_table_that_rows_are_looked_up_in_is_not_read(tied: bool) -> None:
    module = Embedder(tied)
    piece = Piece(fx.symbolic_trace(module), ("ids",), ("logits",), ())
    assert sum(parameter.nbytes for parameter in module.parameters()) == (160 if tied else 320)
    assert piece.read_bytes == 160
