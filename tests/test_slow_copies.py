"""Copies that take their time: an error of order must not pass because copies are fast."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from torch import Tensor

from specstream.batch import RoundBatch
from specstream.check import prove_rounds
from specstream.engine import Engine
from specstream.errors import InvalidDistribution, InvalidPlan
from specstream.pieces import finish
from specstream.round_plan import Lane, Plan, StepOp
from specstream.round_spec import RoundSpec
from tests.copies import NEW_TOKENS, Copies, assert_exact
from tests.helpers import Request, make_engine, model, prompt, reference, serve


def _jitter(seed: int, most: float) -> Callable[[], float]:
    """Delays from none to `most` seconds, often none."""
    generator = random.Random(seed)
    return lambda: max(0.0, generator.uniform(-most, most))


def serve_pair(engine: Engine) -> list[Request]:
    requests = [Request(prompt(14), 12), Request(prompt(9, 1), 10, joins=2)]
    serve(engine, requests)
    return requests


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("slow", ["fetches", "offloads", "both"])
def test_slow_and_jittered_copies(slots: int, slow: str) -> None:
    target = model("qwen3")
    copies = Copies(
        to_device=_jitter(1, 0.002 if slow != "offloads" else 0.0),
        to_host=_jitter(2, 0.004 if slow != "fetches" else 0.0),
    )
    engine = make_engine(
        target,
        target,
        chunk_tokens=3,
        staging_slots=slots,
        group_chunks=1,
        num_speculative_tokens=3,
        max_num_batched_tokens=5,
        max_model_len=32,
        gpu_kv_budget="64KiB",
        max_num_seqs=2,
        debug=True,
    )
    with copies.watch(engine):
        assert_exact(target, *serve_pair(engine))


@dataclass
class Stripped:
    """Plans without some steps."""

    plan_of: Callable[[RoundSpec], Plan]
    dropped: tuple[StepOp, Lane, str] | None
    """By what they do, on which lane, and how the task they name begins."""
    plans: list[Plan] = field(default_factory=list)

    def plan(self, spec: RoundSpec) -> Plan:
        plan = self.plan_of(spec)
        if self.dropped is not None:
            op, lane, name = self.dropped
            kept = (s for s in plan.steps if not (s.op is op and s.lane is lane and s.name.startswith(name)))
            plan = replace(plan, steps=tuple(kept))
        self.plans.append(plan)
        return plan

    def refused(self) -> bool:
        """Whether the proof finds fault with some two of the rounds that were run."""
        for first, second in pairwise(self.plans):
            try:
                finish(prove_rounds([first, second]))
            except InvalidPlan:
                return True
        return False


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize(
    ("op", "lane", "name", "seen"),
    [
        (StepOp.WAIT, Lane.TARGET, "fetch", True),  # an attend before its fetch has landed
        (StepOp.WAIT, Lane.LINK, "offload", True),  # a fetch of what is not on the host yet
        (StepOp.SYNC, Lane.STORE, "", True),  # the next round before the chunk is out
        # On a CPU the target's tasks are done when they are launched, so only the proof can tell:
        (StepOp.WAIT, Lane.LINK, "attend", False),  # vllm 47282: a fetch into a slot that is still read
        (StepOp.WAIT, Lane.STORE, "append", False),  # vllm 45704: an offload before the rows are written
    ],
)
def test_every_kind_of_wait_is_needed(
    op: StepOp, lane: Lane, name: str, seen: bool, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model("qwen3")
    slow = 0.06 if dropped and seen else 0.005  # long enough that a race is lost on a busy machine too
    copies = Copies(
        to_device=lambda: slow / 6 if lane is Lane.TARGET else 0.0,
        to_host=lambda: slow if lane is not Lane.TARGET else 0.0,
    )
    engine = make_engine(
        target,
        chunk_tokens=2,
        staging_slots=2,
        group_chunks=1,
        num_speculative_tokens=1,
        max_num_batched_tokens=6,
        max_model_len=26,
        gpu_kv_budget="min",
    )
    engine._executor.store.ring.fill_(float("nan"))
    engine._executor.store.blocks.fill_(float("nan"))
    stripped = Stripped(engine._planner.plan, (op, lane, name) if dropped else None)
    monkeypatch.setattr(engine._planner, "plan", stripped.plan)
    monkeypatch.setattr(engine._planner, "prove", lambda plan: None)  # it would refuse to go on
    requests = [Request(prompt(18), 7), Request(prompt(20, 1), 6)]
    with copies.watch(engine):
        try:
            serve(engine, requests)
            expected = [reference(target, r.prompt, NEW_TOKENS).tokens[: r.max_new_tokens] for r in requests]
            right = [r.tokens for r in requests] == expected
        except InvalidDistribution:  # it met the NaN of a buffer that nothing had been written to
            right = False
    assert right is not (dropped and seen)
    assert stripped.refused() is dropped


def test_fetches_for_the_next_round_start_before_the_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model("qwen3")
    landed = threading.Semaphore(0)

    def copy(destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)
        landed.release(len(destination))  # chunks

    engine = make_engine(
        target,
        target,
        copy=copy,
        chunk_tokens=4,
        staging_slots=3,
        group_chunks=1,
        num_speculative_tokens=2,
        max_model_len=64,
        gpu_kv_budget="min",
    )
    draft = engine._speculator.draft
    ahead: list[bool] = []
    run = engine._executor.run

    def watched_run(plan: Plan, spec: RoundSpec, batch: RoundBatch) -> None:
        chunks = spec.num_fetches - len(spec.entry) + len(spec.exit)  # a group is one
        chunks += spec.num_layers * sum(seat.offload for seat in spec.seats)

        def drafting(step: int) -> None:
            if step == 0:
                ahead.append(all(landed.acquire(timeout=20) for _ in range(chunks)))
            draft(step)

        monkeypatch.setattr(engine._speculator, "draft", drafting)
        run(plan, spec, batch)

    monkeypatch.setattr(engine._executor, "run", watched_run)
    with engine:
        engine.generate([list(prompt(20))], max_new_tokens=12)
    assert len(ahead) >= 4
    assert all(ahead)
