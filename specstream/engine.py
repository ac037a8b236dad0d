"""The engine: requests in, rounds run, tokens out."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specstream.batch import RoundBatch, SeatRows, flatten_rows
from specstream.draft import Drafter
from specstream.errors import EngineBusy, EngineClosed, InvalidOption
from specstream.exclusive import exclusive
from specstream.executor import CpuExecutor
from specstream.generate import GenerateOutput, generate
from specstream.kv import HostStore
from specstream.memory import MemoryPlan
from specstream.metrics import Counters, Metrics
from specstream.options import Options
from specstream.outputs import RequestOutput, StepOutput
from specstream.plan import Plan
from specstream.planner import Planner
from specstream.processors import make_sampling
from specstream.prompt import positive, token_ids
from specstream.round_spec import RoundSpec, SeatSpec
from specstream.scheduler import RequestRows, Scheduler
from specstream.sequence import FinishReason, Sequence
from specstream.settings import merge_settings
from specstream.speculate import Speculation

MOST_USELESS_ROUNDS = 64
"""Rounds without one accepted candidate after which a request is decoded without candidates."""


class Engine:
    """Serves requests with one target and, if there is one, a drafter. Made by `specstream.compile`.

    One call at a time: while one is under way, calls from other threads are refused with `EngineBusy`.
    """

    def __init__(
        self,
        options: Options,
        memory: MemoryPlan,
        planner: Planner,
        executor: CpuExecutor,
        host: HostStore,
        drafter: Drafter | None,
        tokenizer: Any = None,
        generation_config: Any = None,
    ) -> None:
        self.options, self.memory = options, memory
        self.tokenizer, self.generation_config = tokenizer, generation_config
        self._planner, self._executor, self._host, self._drafter = planner, executor, host, drafter
        self._scheduler = Scheduler(memory, executor.store, host, options.max_num_seqs, options.max_num_batched_tokens)
        self._speculation = Speculation(options.rejection_sample_method, options.draft_sample_method)
        self._counters = Counters()
        self._next_id = 0
        self._last: tuple[Plan, dict[int, int]] | None = None
        """The last round's plan and which request sat where, as long as its prefetches are of use."""
        self._undelivered: list[StepOutput] = []
        self._latest_plan: Plan | None = None
        self._lock = threading.RLock()
        self._generating = self._in_round = self._closed = False

    # Requests

    @exclusive
    def submit(
        self,
        prompt: Seq[int],
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Seq[int] | None = None,
        generation_config: GenerationConfig | None = None,
        seed: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        logits_processor: Seq[LogitsProcessor] = (),
        stopping_criteria: Seq[StoppingCriteria] = (),
    ) -> int:
        """Queues a request; it joins between two rounds. Without a generation_config it is decoded greedily.

        Args:
            prompt: token ids.
            max_new_tokens: most tokens to produce; None for the generation_config's.
            eos_token_id: end token or tokens, instead of the generation_config's; the one produced is part of the
                output.
            generation_config: the request's settings (`specstream.settings.HONOURED`).
            seed: of a sampled text; None draws one from torch's global generator.
            presence_penalty, frequency_penalty, logit_bias: as OpenAI and vLLM define them.
            logits_processor: the caller's own, after transformers' penalties and before temperature. They may keep
                state: nothing is drafted for the request, so that they see committed tokens only, in order.
            stopping_criteria: the caller's own; they see committed tokens only.

        Returns:
            The request's id.

        Raises:
            InvalidOption: the prompt is empty, has ids out of range, or leaves no room under `max_model_len`; a
                setting that is not supported.
            OutOfBudget: it can never fit.
        """
        self._check_open()
        prompt = token_ids(prompt, self._planner.model.spec.vocab_size, self.memory.max_model_len)
        config = merge_settings(None, generation_config)
        if max_new_tokens is None:
            max_new_tokens = config.max_new_tokens
        max_new_tokens = positive("max_new_tokens", max_new_tokens)
        if eos_token_id is not None:
            config.eos_token_id = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        limit = min(len(prompt) + max_new_tokens, self.memory.max_model_len)
        config.max_length = limit
        sampling = make_sampling(
            config,
            len(prompt),
            seed,
            extra=logits_processor,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
        )
        ends = frozenset(config.eos_token_id or ())
        stopping = StoppingCriteriaList(stopping_criteria)
        if config.stop_strings:
            stopping.append(self._stop_strings(config.stop_strings))
        sequence = Sequence(self._next_id, len(prompt), limit, ends, prompt, sampling=sampling, stopping=stopping)
        sequence.drafts = not logits_processor
        self._scheduler.submit(sequence)
        self._next_id += 1
        return sequence.request_id

    @exclusive
    def cancel(self, request_id: int) -> RequestOutput | None:
        """Ends a request and frees what it held; None if it is not running or waiting."""
        self._check_open()
        for sequence in self._unfinished():
            if sequence.request_id == request_id:
                return self._leave(sequence, FinishReason.CANCELLED)
        return None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished() or self._undelivered)

    @exclusive
    def generate(self, /, input_ids: Tensor | Seq[Seq[int]], **arguments: Any) -> Tensor | GenerateOutput:
        """Completes a batch of prompts as transformers' `generate` does; see `specstream.generate.generate`."""
        if self._generating:
            raise EngineBusy
        self._generating = True
        try:
            return generate(self, input_ids, **arguments)
        finally:
            self._generating = False

    @exclusive
    def reset(self) -> None:
        """Cancels everything and sets the counters to zero. The memory stays."""
        self._check_open()
        self._cancel_all()
        self._counters = Counters()
        self._latest_plan = None
        self._executor.reset_counters()

    @exclusive
    def close(self) -> None:
        """Cancels everything, ends the threads and frees the KV memory. Closing twice does nothing."""
        if not self._closed:
            self._cancel_all()
            self._closed = True
            self._executor.close()
            self._host.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Rounds

    @exclusive
    def step(self) -> list[StepOutput]:
        """Runs one round: prompts that still have to be computed, and one verification of every other request.

        Returns:
            What was produced, for each request that produced something.

        Raises:
            Whatever went wrong in the round; no request has then moved, and the step can be tried again. (An
            interrupt that strikes after the round, while its results are noted, cancels all requests.)
        """
        self._check_open()
        outputs = self.run_round()
        undelivered, self._undelivered = self._undelivered, []  # after the round: if it fails, they wait for the next
        return undelivered + outputs

    def hand_over(self, outputs: list[StepOutput]) -> None:
        """Keeps outputs of requests that somebody else submitted for the next `step`."""
        self._undelivered += outputs

    def run_round(self) -> list[StepOutput]:
        """One round, without the outputs kept by `hand_over`."""
        self._check_open()
        self._in_round = True
        try:
            return self._run_round()
        finally:
            self._in_round = False

    def _run_round(self) -> list[StepOutput]:
        for sequence in self._scheduler.admit():
            self._counters.longest_request = max(self._counters.longest_request, sequence.limit)
        rows = self._scheduler.choose_rows()
        if not rows:
            return []
        start = time.perf_counter()
        plan = self._latest_plan = self._plan_round(rows)
        try:
            with torch.no_grad():
                self._executor.run(plan, self._batch(rows))
        except BaseException:
            self._last = None
            for row in rows:
                self._forget_drafts(row.sequence)
            raise
        self._last = (plan, _seating(rows))
        try:
            outputs = [self._commit(row, plan) for row in rows]
        except BaseException:  # an interrupt between two assignments: some request may be half moved
            self._cancel_all()
            raise
        self._counters.count_round(rows, plan.spec.streamed_bytes, time.perf_counter() - start)
        return [output for output in outputs if output is not None]

    @property
    def plan(self) -> Plan:
        """The plan of the last round, or, before the first, of one request near `max_model_len`."""
        if self._latest_plan is not None:
            return self._latest_plan
        memory = self.memory
        total = memory.layout.chunks_of(memory.max_model_len)
        resident = memory.resident_chunks(total, memory.num_blocks, self.options.max_num_seqs)
        streamed = max(0, total - resident - 1)
        seat = SeatSpec(0, resident, memory.tail_slots, streamed, 0, min(resident + streamed, total - 1), 1)
        return self._planner.plan(replace(self._spec((seat,), drafts=True), warm=True))

    def metrics(self) -> Metrics:
        """The counters since the engine was made or reset."""
        return self._counters.metrics(self.memory, self._executor.streamed_bytes, self._executor.link_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed; make a new one with specstream.compile")

    def _stop_strings(self, strings: str | list[str]) -> StopStringCriteria:
        if self.tokenizer is None:
            way_out = "Compile the target by name or directory, or set engine.tokenizer."
            raise InvalidOption("stop_strings", strings, "None without a tokenizer", way_out)
        return StopStringCriteria(self.tokenizer, strings)

    def _unfinished(self) -> list[Sequence]:
        return [*self._scheduler.waiting, *self._scheduler.running]

    def _leave(self, sequence: Sequence, reason: FinishReason) -> RequestOutput:
        """Takes a request out and frees what it holds."""
        self._drop_prefetches()
        self._forget_drafts(sequence)
        self._scheduler.remove(sequence)
        prompt = sequence.tokens[: sequence.prompt_length]
        return RequestOutput(sequence.request_id, prompt, sequence.new_tokens, reason, sequence.metrics)

    def _cancel_all(self) -> None:
        for sequence in self._unfinished():
            self._leave(sequence, FinishReason.CANCELLED)
        self._undelivered.clear()

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self._drafter is not None:
            self._drafter.free(sequence.seat)

    def _drop_prefetches(self) -> None:
        self._executor.drain()
        self._last = None

    def _plan_round(self, rows: list[RequestRows]) -> Plan:
        """The round's plan: warm if what the last round has fetched ahead is what this one needs first."""
        seats = tuple(row.seat_spec(self.options.num_speculative_tokens) for row in rows)
        cold = self._spec(seats, drafts=any(row.logits for row in rows))
        warm = replace(cold, warm=True)
        if self._last is None or self._last[0].spec.exit != warm.entry or self._last[1] != _seating(rows):
            self._drop_prefetches()
            return self._planner.plan(cold)
        plan = self._planner.plan(warm)
        if self.options.debug:
            self._last[0].check(plan)
        return plan

    def _spec(self, seats: tuple[SeatSpec, ...], *, drafts: bool) -> RoundSpec:
        memory = self.memory
        return RoundSpec(
            num_layers=memory.layout.num_layers,
            staging_slots=memory.staging_slots,
            chunks_per_group=memory.chunks_per_group,
            bytes_per_chunk=memory.layout.block_bytes,
            seats=seats,
            warm=False,
            draft_steps=self.options.num_speculative_tokens if drafts and self._drafter else 0,
        )

    def _batch(self, rows: list[RequestRows]) -> RoundBatch:
        flat = [(row.tokens, row.kv.length, row.logits) for row in rows]
        inputs, places = flatten_rows(flat, self._planner.model.spec.device)
        seats = {row.sequence.seat: SeatRows(row.kv, *place) for row, place in zip(rows, places, strict=True)}
        return RoundBatch(
            inputs,
            seats,
            accept=lambda logits: self._accept(rows, logits[0]),
            draft=lambda step: self._draft(rows, step),
        )

    def _accept(self, rows: list[RequestRows], logits: Tensor) -> None:
        """Decides what each request produced, from logits [R, vocab]. Nothing is committed: the round may fail."""
        at = 0
        for row in rows:
            if row.logits:
                sequence = row.sequence
                own = logits[at : at + row.logits]
                accepted, produced = self._speculation.accept(sequence.sampling, own, sequence.tokens, row.candidates)
                row.produced, row.finish_reason = sequence.cut(produced)
                row.accepted = min(accepted, len(row.produced))
                at += row.logits

    def _draft(self, rows: list[RequestRows], step: int) -> None:
        """One draft step for every request that goes on and has room for one more candidate."""
        assert self._drafter is not None
        wanted = {row.sequence.seat: row for row in rows if self._has_room(row, step)}
        if not wanted:
            return
        if step == 0:
            logits = self._drafter.start({s: r.sequence.tokens + r.produced for s, r in wanted.items()})
        else:
            logits = self._drafter.extend({s: r.next_candidates.tokens[-1] for s, r in wanted.items()})
        for seat, row in wanted.items():
            if logits[seat].isnan().any():
                row.draft_failed = True
                continue
            text = row.sequence.tokens + row.produced
            self._speculation.propose(row.sequence.sampling, logits[seat], text, row.next_candidates)

    def _has_room(self, row: RequestRows, step: int) -> bool:
        """Whether the request goes on and has a place for candidate `step`, in its limit and the draft's positions."""
        assert self._drafter is not None
        if not row.produced or row.finish_reason or row.draft_failed or not row.sequence.drafts:
            return False
        length = len(row.sequence.tokens) + len(row.produced)
        return length + step + 1 < row.sequence.limit and self._drafter.reaches(length + step - 1)

    def _commit(self, row: RequestRows, plan: Plan) -> StepOutput | None:
        """Moves the request to where the round brought it."""
        sequence = row.sequence
        row.kv.length += row.committed
        row.kv.streamed += next(s.offload for s in plan.spec.seats if s.seat == sequence.seat)
        if not row.prompt:
            sequence.metrics.num_verify_rounds += 1
            sequence.metrics.num_draft_tokens += len(row.candidates.tokens)
            sequence.metrics.num_accepted_tokens += row.accepted
            self._judge_draft(row)
        if not row.logits:
            return None
        sequence.tokens += row.produced
        sequence.candidates = row.next_candidates
        output = self._leave(sequence, row.finish_reason) if row.finish_reason else None
        return StepOutput(sequence.request_id, row.produced, output)

    def _judge_draft(self, row: RequestRows) -> None:
        """Turns speculation off for a request whose candidates have long been of no use."""
        sequence = row.sequence
        if row.accepted:
            sequence.useless_rounds = 0
        elif row.candidates.tokens or row.draft_failed:
            sequence.useless_rounds += 1
        if sequence.drafts and sequence.useless_rounds >= MOST_USELESS_ROUNDS:
            sequence.drafts = False
            warnings.warn(
                f"the draft was of no use in {MOST_USELESS_ROUNDS} rounds in a row: speculation is off for request "
                f"{sequence.request_id}, whose text is not affected",
                stacklevel=2,
            )


def _seating(rows: list[RequestRows]) -> dict[int, int]:
    """Which request sits where."""
    return {row.sequence.seat: row.sequence.request_id for row in rows}
