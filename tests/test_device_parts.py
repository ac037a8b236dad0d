"""Parts of rounds on the device: the rows of a draft step, what a drafter lacks, which settings the kernels apply."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

pytest.importorskip("triton")

from specstream import block_window
from specstream.batch import FlatRows, RoundBatch, SeatRows
from specstream.cuda_draft import CudaDrafter
from specstream.device_accept import SeatTables, accept_on_device
from specstream.device_draft import DeviceDraft
from specstream.draft import DraftWindow, _DraftSeat
from specstream.kernel_settings import KernelSettings
from specstream.kv import ChunkLayout, SequenceKV
from specstream.processors import make_sampling
from specstream.round_tables import RoundTables
from specstream.sampling import Sampling
from specstream.scheduler import RequestRows
from specstream.sequence import Sequence
from specstream.settings import merge_settings
from specstream.speculate import Candidates, Speculation, SyntheticAcceptance
from specstream.table_sizes import TableSizes, Tilings
from tests.helpers import captured, model

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("rows_of_seat", [1, 2])
def test_rows_are_placed_as_on_the_host(rows_of_seat: Literal[1, 2], monkeypatch: pytest.MonkeyPatch) -> None:
    """For any length, with few and with all blocks: what is left out was dropped, and the ring comes round."""
    monkeypatch.setattr(block_window, "BLOCK_TOKENS", 8)
    monkeypatch.setattr(block_window, "FEED_TOKENS", 8)
    for window in (None, 5, 11):
        drafter = CudaDrafter(captured(model("qwen3", torch.float32, layers=1)), DraftWindow(96, window, 4), 96, 2)
        tables = SeatTables(2, 3, torch.device("cpu"))
        device = DeviceDraft(drafter, tables, "greedy", rows_of_seat)
        drafter.catch_up({0: ([], []), 1: ([], [])})
        slots = [drafter.places(seat) for seat in (0, 1)]
        device._given.device["slots"].copy_(torch.tensor(slots))
        for seed in range(40):
            chooser = random.Random(seed)
            step = chooser.randrange(3)
            lengths, accepted = [chooser.randrange(1, 90) for _ in slots], [chooser.randrange(-1, 4) for _ in slots]
            computed = [max(0, count - rows_of_seat + 1) for count in accepted]
            most = [chooser.randrange(0, 97) for _ in slots]
            produced = torch.randint(200, (2, 4))
            for name, values in (("accepted", accepted), ("produced", produced)):
                tables.found.device[name].copy_(torch.as_tensor(values))
            tables.found.device["next_candidates"].copy_(torch.randint(200, (2, 3)))
            tables.given.device["positions"].copy_(torch.tensor(lengths))
            device._given.device["computed"].copy_(torch.tensor(computed))
            device._given.device["most_length"].copy_(torch.tensor(most))
            device._step.fill_(step - 1)
            device.place()
            assert device._step.tolist() == [step, step]
            check_placed(device, step, lengths, accepted, computed, most)


def check_placed(
    device: DeviceDraft, step: int, lengths: list[int], accepted: list[int], computed: list[int], most: list[int]
) -> None:
    drafter, tables, rows = device.drafter, device.tables, device._rows
    rows_of, fed = {}, []
    for seat, (length, kept) in enumerate(zip(lengths, accepted, strict=True)):
        text = length + kept + 1
        count = max(0, min(most[seat] - text, 3)) if kept >= 0 else 0
        assert int(tables.proposed.candidates_count[seat]) == count
        if step >= count:
            assert int(rows.keys.row_count[seat]) == 0
            continue
        assert int(tables.proposed.positions[seat]) == text
        if step == 0:
            tokens = tables.found.device["produced"][seat, computed[seat] : kept + 1].tolist()
        else:
            tokens = [int(tables.proposed.candidates[seat, step - 1])]
        first = length + computed[seat] if step == 0 else text + step - 1
        place = drafter._place(seat)
        place.length = first
        rows_of[seat] = SeatRows(place, rows.of_seat * seat, len(tokens))
        fed += [(rows.of_seat * seat + i, t if t < 96 else 0, first + i) for i, t in enumerate(tokens)]
    specs = tuple(drafter.blocks.seat(seat, r.kv.length, r.count) for seat, r in rows_of.items())
    for row, token, position in fed:
        assert (int(rows.input_ids[0, row]), int(rows.position_ids[0, row])) == (token, position)
    sizes = TableSizes(len(specs), 8, rows.of_seat, drafter.blocks.blocks, rows.of_seat, 0, 0, 1)
    tilings = Tilings.of(sizes, drafter.store.layout, 4)
    want = RoundTables(sizes, tilings, tables.device)
    want.fill(specs, (), RoundBatch(FlatRows.of([]), rows_of, lambda _: None, lambda _: None), 8)
    want.upload()
    for index, (seat, placed) in enumerate(rows_of.items()):
        got, wanted = rows.keys, want.local
        for name in ("row_start", "row_count", "key_count"):
            assert getattr(got, name)[seat] == getattr(wanted, name)[index]
        used = -(-int(wanted.key_count[index]) // 8)
        assert torch.equal(got.block_table[seat, :used], wanted.block_table[index, :used])
        assert rows.position[seat] == want.position[index]
        used = (placed.kv.length + placed.count - 1) // 8 - placed.kv.length // 8 + 1
        assert torch.equal(rows.append_table[seat, :used], want.append_table[index, :used])
        assert int(rows.logit_rows[seat]) == placed.stop - 1


def test_made_up_acceptance_reads_rows_of_the_round_alone() -> None:
    """Seats that were in a larger round before have no rows any more."""
    made_up = Speculation("standard", "greedy", SyntheticAcceptance(rate=1.0))
    tables = SeatTables(4, 2, torch.device("cpu"))
    kv = SequenceKV(ChunkLayout(1, 1, 1, 16, torch.float32), 99, 1, 1, [0], None)

    def verify(seats: list[int]) -> list[list[int]]:
        rows = []
        for seat in seats:
            sequence, candidates = Sequence(seat, 1, 99, frozenset(), [1], seat=seat), Candidates([5, 6])
            rows.append(RequestRows(sequence, kv, [1, 5, 6], False, candidates, 3))
        tables.fill(rows, [KernelSettings()] * len(rows), made_up)
        logits = torch.zeros(3 * len(rows), 8)
        logits[2::3, 7] = 1.0
        accept_on_device(tables, logits, frozenset(), "coupled", True, None)
        produced: list[list[int]] = tables.found.device["produced"].tolist()
        return [produced[seat] for seat in seats]

    assert verify([0, 1, 2, 3]) == [[5, 6, 7]] * 4
    assert verify([0]) == [[5, 6, 7]]


def test_what_a_drafter_lacks() -> None:
    """Against the plainest way to find it, over texts of two letters."""
    for seed in range(200):
        chooser = random.Random(seed)
        cached, committed, proposed = ([chooser.randrange(2) for _ in range(chooser.randrange(5))] for _ in range(3))
        seat = _DraftSeat(beyond=list(cached))
        whole = committed + proposed
        common = next((i for i, pair in enumerate(zip(cached, whole, strict=False)) if pair[0] != pair[1]), None)
        common = min(len(cached), len(whole)) if common is None else common
        assert seat.follow(committed, proposed) == whole[common:]
        assert seat.agreed == min(common, len(committed))
        assert seat.beyond == whole[seat.agreed : common]
        seat.go_on(common, [5], [6, 7])
        assert (seat.agreed, seat.beyond, seat.length) == (common + 1, [6, 7], common + 3)


def test_settings_that_are_the_kernels() -> None:
    def settings(**given: Any) -> KernelSettings | None:
        return KernelSettings.of(make_sampling(merge_settings(None, **given), 2, 0))

    assert settings() == KernelSettings()
    assert settings(do_sample=True, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1) == KernelSettings(0.5, 7, 0.9, 0.1)
    assert settings(do_sample=True, top_k=0, top_p=0.9) == KernelSettings(top_p=0.9)
    assert settings(do_sample=True, top_k=10**12) == KernelSettings(top_k=2**31 - 1)
    for given in ({"typical_p": 0.5, "do_sample": True}, {"suppress_tokens": [3]}, {"renormalize_logits": True}):
        assert settings(**given) is None
    for odd in (
        [TopKLogitsWarper(3), TemperatureLogitsWarper(0.5)],
        [TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [TopKLogitsWarper(3, filter_value=-1.0)],
        [TopKLogitsWarper(3), TopKLogitsWarper(2)],
    ):
        assert KernelSettings.of(Sampling(True, 0, LogitsProcessorList(odd))) is None
