"""Acceptance on the device, for all seats of a round at once: launched without waiting for the host, and read later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specstream.kernel_settings import KernelSettings
from specstream.kernels.accept import Best, Method, Seats, accept
from specstream.kernels.process import process
from specstream.mirror import Mirror
from specstream.scheduler import RequestRows
from specstream.speculate import Speculation

Settings = dict[str, Tensor]
"""Arguments of `process`, [rows], by name."""


class SeatTables:
    """What the kernels are told about the seats of a round, and what they find, in buffers that keep their places.

    A request's place in them is its seat, whoever else is there.
    """

    def __init__(self, seats: int, depth: int, device: torch.device, guesses: int = 0) -> None:
        """`depth` is the most candidates of a seat, K; `guesses` how many of the draft's best tokens are noted."""
        self.seats, self.depth, self.device = seats, depth, device
        rows = seats * (depth + 1)
        self.given = Mirror(
            {
                "count": (torch.int32, (seats,)),
                "candidates": (torch.int64, (seats, depth)),
                "positions": (torch.int64, (seats,)),
                "seeds": (torch.int64, (seats,)),
                "do_sample": (torch.bool, (seats,)),
                "row_start": (torch.int32, (seats,)),
                "made_up": (torch.int64, (seats,)),  # how many candidates synthetic acceptance takes
                "seat_of_row": (torch.int64, (rows,)),
                "temperature": (torch.float32, (seats,)),
                "top_k": (torch.int32, (seats,)),
                "top_p": (torch.float64, (seats,)),
                "min_p": (torch.float32, (seats,)),
            },
            device,
        )
        self.found = Mirror(
            {
                "accepted": (torch.int32, (seats,)),
                "produced": (torch.int64, (seats, depth + 1)),
                "tops": (torch.float32, (seats, depth + 1)),  # the best score of each of the target's rows
                "next_count": (torch.int32, (seats,)),
                "next_candidates": (torch.int64, (seats, depth)),
                "next_tops": (torch.float32, (seats, depth)),  # and of each draft step's
                "guesses": (torch.int64, (seats, depth, guesses)),
            },
            device,
        )
        given, found = self.given.device, self.found.device
        shared = given["seeds"], given["do_sample"]
        self.verified = Seats(given["count"], given["candidates"], given["positions"], *shared)
        """The candidates that a round verifies."""
        positions = torch.zeros_like(given["positions"])
        self.proposed = Seats(found["next_count"], found["next_candidates"], positions, *shared)
        """Those that its draft steps propose."""

    def fill(self, rows: list[RequestRows], settings: Sequence[KernelSettings], speculation: Speculation) -> None:
        """Tells the device about a round's requests, which all have logits, or those that do not verify in it; on the
        current stream."""
        write = self.given.host
        write["count"][:] = -1
        write["row_start"][:] = 0
        write["do_sample"][:] = False
        for name in ("temperature", "top_k", "top_p", "min_p"):
            write[name][:] = getattr(KernelSettings, name)
        at = 0
        for row, setting in zip(rows, settings, strict=True):
            sequence, candidates = row.sequence, row.candidates.tokens
            seat, sampling, position = sequence.seat, sequence.sampling, row.text_length
            write["count"][seat] = len(candidates)
            write["candidates"][seat, : len(candidates)] = candidates
            write["positions"][seat] = position
            write["seeds"][seat] = (sampling.seed + 2**63) % 2**64 - 2**63
            write["do_sample"][seat] = sampling.do_sample
            write["row_start"][seat] = at
            write["seat_of_row"][at : at + row.logits] = seat
            if speculation.synthetic is not None:
                accepted = speculation.synthetic.accepted(len(candidates), sampling.noise, position)
                write["made_up"][seat] = accepted
            for name in setting.used:
                write[name][seat] = getattr(setting, name)
            at += row.logits
        self.given.upload()

    def tell_known(self, rows: list[RequestRows]) -> None:
        """Writes what requests that do not verify have produced where acceptance would; on the current stream."""
        write = self.found.host
        write["accepted"][:] = -1
        for row in rows:
            seat, known = row.sequence.seat, row.known
            write["accepted"][seat] = len(known) - 1
            write["produced"][seat, : len(known)] = known
        self.found.upload()

    def settings(self, used: frozenset[str]) -> Settings:
        """Those of each seat."""
        return {name: self.given.device[name] for name in used}


def accept_on_device(
    tables: SeatTables, logits: Tensor, used: frozenset[str], method: Method, synthetic: bool, drawn_from: Tensor | None
) -> None:
    """Verifies the candidates of every seat; what comes out is written to `tables.found`.

    Args:
        logits: the target's, [rows, vocab], one seat's rows after the other's.
        used: the settings that a seat uses.
        synthetic: accept as many candidates as `tables` says instead.
        drawn_from: float64 [seats, K, vocab], what candidates were drawn from; for "standard".
    """
    given, found = tables.given.device, tables.found.device
    seat_of_row = given["seat_of_row"][: len(logits)]
    scores, best_key = process(logits, **{name: each[seat_of_row] for name, each in tables.settings(used).items()})
    out, best = (found["accepted"], found["produced"]), Best(best_key, found["tops"])
    accept(tables.verified, scores, given["row_start"], method, drawn_from, out=out, best=best)
    if synthetic:
        for written, made_up in zip(out, _made_up(tables, scores), strict=True):
            written.copy_(made_up)


def _made_up(tables: SeatTables, scores: Tensor) -> tuple[Tensor, Tensor]:
    """What synthetic acceptance makes of a round, in the form of what `accept` returns."""
    given = tables.given.device
    count = torch.where(given["count"] < 0, -1, given["made_up"])
    own = scores.index_select(0, given["row_start"] + count.clamp_min(0)).argmax(-1)
    index = torch.arange(tables.depth + 1, device=tables.device)
    kept = F.pad(given["candidates"], (0, 1))
    after = torch.where(index == count[:, None], own[:, None], -1)
    return count, torch.where(index < count[:, None], kept, after)
