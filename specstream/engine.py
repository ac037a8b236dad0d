"""The engine: requests in, rounds run, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from torch import Tensor

from specstream.cohorts import balance
from specstream.custom_generate import from_transformers
from specstream.errors import EngineBusy, EngineClosed
from specstream.exclusive import Exclusive, exclusive
from specstream.generate import GenerateOutput, StreamOutput, generate, stream
from specstream.metrics import Counters, Metrics
from specstream.next_round import LastRound, NextRound
from specstream.outputs import RequestOutput, StepOutput, request_output
from specstream.parts import EngineParts, make_parts
from specstream.request import RequestFactory
from specstream.round_batch import round_batch
from specstream.round_plan import Plan
from specstream.round_spec import RoundSpec
from specstream.scheduler import RequestRows, Scheduler
from specstream.sequence import FinishReason, Sequence
from specstream.traces.run_writer import KEPT_ROUNDS
from specstream.tracing import Recorder, trace
from specstream.tuned_settings import TunedSettings

if TYPE_CHECKING:
    from specstream.tuning import Tuning


class Engine(Exclusive):
    """Serves requests with one target and, if there is one, a drafter. Made by `specstream.compile`.

    One call at a time: while one is under way, calls from other threads are refused with `EngineBusy`.
    """

    def __init__(self, parts: EngineParts, tokenizer: Any = None, generation_config: Any = None) -> None:
        super().__init__()
        self.tokenizer, self.generation_config = tokenizer, generation_config
        self.target: ReferenceType[Any] | None = None
        """The module that was compiled, if it was given as one."""
        self._next_id = 0
        self._undelivered: list[StepOutput] = []
        """The inbox of submitted requests: what the next `step` returns."""
        self._abandoned: list[int] = []
        self.recorder: Recorder | None = None
        """What is told of every round while the engine is traced."""
        self.use(parts)

    def use(self, parts: EngineParts) -> None:
        """Goes on with other parts, without requests."""
        self.parts, self.options, self.memory = parts, parts.options, parts.memory
        self._planner, self._executor, self._host = parts.planner, parts.executor, parts.host
        self._speculator, store = parts.speculator, parts.executor.store
        self._scheduler = Scheduler(self.memory, store, self._host, self.options.max_num_seqs, parts.by_turns)
        self._next_round = NextRound(self.options, self.memory, self._scheduler, self._planner)
        self._requests = RequestFactory(self.vocab_size, self.memory.max_model_len)
        self._counters = Counters()
        self._last: LastRound | None = None
        """The last round, if it succeeded: its fetches for the next one are in flight."""
        self._latest_spec: RoundSpec | None = None
        self._closing = self._closed = False

    def use_anew(self, settings: TunedSettings | None) -> None:
        """Goes on once its parts were closed, with tuned settings or without; if that fails, it is closed."""
        parts, self._closing, self._closed = self.parts, True, True
        self.use(make_parts(parts.requested, parts.target, parts.draft, settings, parts.streams))

    @exclusive
    def tune(self, /, **arguments: Any) -> Tuning:
        """Finds the fastest settings here and goes on with them; see `specstream.tuning.tune` for the arguments."""
        from specstream.tuning import tune  # here, since it makes engines of its own

        self._check_open()
        return tune(self, **arguments)

    # Requests

    @exclusive
    def submit(self, /, prompt: Seq[int], **arguments: Any) -> int:
        """Queues a request; it joins between two rounds. Without a generation_config it is decoded greedily.

        Args:
            prompt: token ids.
            arguments: of `specstream.request.RequestFactory.make`: max_new_tokens, eos_token_id, generation_config,
                seed, logprobs, presence_penalty, frequency_penalty, logit_bias, logits_processor, stopping_criteria,
                prefix_allowed_tokens_fn. The model's own generation_config is not looked at: nothing but what is
                given here ends the text before max_new_tokens.

        Returns:
            The request's id.

        Raises:
            InvalidOption: the prompt is empty, has ids out of range, or leaves no room under `max_model_len`; a
                setting that is not supported.
            OutOfBudget: it can never fit.
        """
        sequence = self.make_request(prompt, self._undelivered, **arguments)
        self.enqueue(sequence)
        return sequence.request_id

    @exclusive
    def make_request(self, prompt: Seq[int], inbox: list[StepOutput], /, **arguments: Any) -> Sequence:
        """What `submit` queues, checked but not queued. Its outputs will go to `inbox`."""
        self._check_open()
        sequence = self._requests.make(self._next_id, prompt, self.tokenizer, **arguments)
        sequence.inbox = inbox
        self._scheduler.check_fits(sequence)
        self._next_id += 1
        return sequence

    @exclusive
    def enqueue(self, sequence: Sequence) -> None:
        """Queues a request that was made but not queued."""
        self._check_open()
        self._scheduler.waiting.append(sequence)

    @exclusive
    def cancel(self, request_id: int) -> RequestOutput | None:
        """Ends a request and frees what it held; None if it is not running or waiting."""
        self._check_open()
        for sequence in self._unfinished():
            if sequence.request_id == request_id:
                return self._cancel(sequence)
        return None

    def abandon(self, request_ids: Set[int]) -> None:
        """Notes requests whose outputs nobody will read, from any thread: they are taken out before the next call."""
        self._abandoned.extend(request_ids)

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.parts.target.spec.vocab_size

    @property
    def has_unfinished(self) -> bool:
        with suppress(EngineBusy):
            self._settle()
        return bool(self._unfinished() or self._undelivered)

    @exclusive
    def generate(
        self, /, input_ids: Any = None, generation_config: Any = None, **arguments: Any
    ) -> Tensor | GenerateOutput:
        """Completes a batch of prompts as transformers' `generate` does; see `specstream.generate.generate`."""
        return generate(self, input_ids, generation_config=generation_config, **arguments)

    @exclusive
    def stream(
        self, /, input_ids: Any = None, generation_config: Any = None, **arguments: Any
    ) -> Iterator[StreamOutput]:
        """What `generate` completes, piece by piece as it comes; see `specstream.generate.stream`."""
        return stream(self, input_ids, generation_config=generation_config, **arguments)

    def custom_generate(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        seed: int | Seq[int] | None = None,
        logprobs: bool = False,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        **prepared: Any,
    ) -> Tensor | GenerateOutput:
        """For transformers: `model.generate(..., custom_generate=engine.custom_generate)`.

        The named arguments can be given to transformers' `generate` too; it passes them on. It keeps for itself, and
        passes to nobody, its streamer, tokenizer (so there are no stop_strings), assistant_model and synced_gpus.
        Another `model` than the target that the engine was compiled from is refused.
        """
        return self.generate(
            seed=seed,
            logprobs=logprobs,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            **from_transformers(model, self.target, input_ids, **prepared),
        )

    @exclusive
    def reset(self) -> None:
        """Cancels everything and sets the counters to zero. The memory stays."""
        self._check_open()
        self._cancel_all()
        self._counters = Counters()
        self._latest_spec = None
        self._executor.reset_counters()

    @exclusive
    def close(self) -> None:
        """Cancels everything, ends the threads and frees the KV memory. Closing twice does nothing.

        If it is interrupted, the engine serves nobody any more, and the next call of it goes on.
        """
        if not self._closed:
            self._closing = True
            self._cancel_all()
            self.parts.close()
            self._closed = True

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
            Or what went wrong for one request alone, such as an error of its own processors or criteria, with a note
            that names it: it is cancelled, the others have moved, and the next step returns what they produced.
        """
        self.run_round()
        for index, output in enumerate(self._undelivered):
            if output.error is not None:  # the output itself comes with the next step
                self._undelivered[index] = replace(output, error=None)
                raise output.error
        outputs = list(self._undelivered)
        self._undelivered.clear()
        return outputs

    @exclusive
    def run_round(self) -> None:
        """One round; what it produced goes to the inboxes of its requests."""
        self._check_open()
        with self.calling_out():
            self._run_round()
        for sequence, warning in self._speculator.warn():
            sequence.inbox.append(StepOutput(sequence.request_id, [], None, error=warning))

    def _run_round(self) -> None:
        for sequence in self._scheduler.admit():
            self._counters.longest_request = max(self._counters.longest_request, sequence.limit)
        running, last = list(self._scheduler.running), self._last
        if self._scheduler.cohorts:
            balance(running)
        turn = self._scheduler.turn_after(running)
        rows = self._scheduler.choose_rows(running, turn)
        drafted = self._scheduler.choose_drafted(running, turn)
        if not rows:
            return
        start, steps = time.perf_counter(), self._speculator.draft_steps(running)
        self._last = None  # a round that fails leaves nothing in flight
        spec = self._latest_spec = self._next_round.structure(running, rows, turn, last, steps)
        if last is not None and self.options.debug:
            self._planner.bound(last.spec).check(self._planner.bound(spec))
        plan, this = self._planner.plan(spec.canonical()), LastRound.of(spec, turn, running)
        try:
            work, everyone = self._next_round.work_ahead(rows, plan, this, steps), self._scheduler.running
            if self.recorder is not None:
                work = chain(work, self.recorder.work_ahead())
            batch = round_batch(rows, drafted, everyone, spec, self._speculator, work, measured=bool(self.recorder))
            with torch.no_grad():
                self._executor.run(plan, spec, batch)
            self._planner.prove(plan)
        except BaseException:
            for row in (*rows, *drafted):
                self._speculator.forget(row.sequence)
            raise
        self._last = this
        self._scheduler.last_turn = self._scheduler.last_turn if turn is None else turn
        try:
            price = partial(self._planner.draft_price, spec)
            with self._scheduler.moving():
                for row in rows:
                    self._commit(row, spec, price)
                for row in drafted:
                    self._take_candidates(row, price)
        except BaseException:  # an interrupt between two assignments: some request may be half moved
            self._cancel_all()
            raise
        seconds = time.perf_counter() - start
        self._counters.count_round(rows, spec.streamed_bytes, seconds)
        if self.recorder is not None and batch.spans is not None:
            self.recorder.add(spec, rows, start, seconds, batch.spans)

    @property
    def plan(self) -> Plan:
        """The plan of the last round, or, before the first, of one request near `max_model_len`."""
        if self._latest_spec is not None:
            return self._planner.bound(self._latest_spec)
        return self._planner.bound(self._next_round.longest(self._speculator.draft_steps([])))

    def trace(
        self, logdir: str | Path, *, run: str | None = None, rounds: int = KEPT_ROUNDS
    ) -> AbstractContextManager[Path]:
        """Records the rounds that run while it lasts, for TensorBoard and others; see `specstream.tracing.trace`."""
        return trace(self, logdir, run, rounds)

    def metrics(self) -> Metrics:
        """The counters since the engine was made or reset."""
        return self._counters.metrics(self.memory, self._executor.streamed_bytes, self._executor.link_bytes)

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosed("the engine is closed; make a new one with specstream.compile")
        self._settle()

    @exclusive
    def _settle(self) -> None:
        """Clears away what an interrupt has left half done, and requests whose outputs nobody will read."""
        if self._scheduler.half_moved:
            self._cancel_all()
        while self._abandoned:
            request_id = self._abandoned[0]
            for sequence in self._unfinished():
                if sequence.request_id == request_id:
                    self._leave(sequence, FinishReason.CANCELLED)
            self._abandoned.remove(request_id)  # last: an interrupt must not make it forgotten

    def _unfinished(self) -> list[Sequence]:
        return [*self._scheduler.waiting, *self._scheduler.running]

    def _leave(self, sequence: Sequence, reason: FinishReason) -> RequestOutput:
        """Takes a request out and frees what it holds."""
        self._speculator.forget(sequence)
        self._scheduler.remove(sequence)
        return self._output(sequence, reason)

    def _output(self, sequence: Sequence, reason: FinishReason) -> RequestOutput:
        return request_output(sequence, reason, synthetic=self._speculator.speculation.synthetic is not None)

    def _tell(self, sequence: Sequence, output: RequestOutput) -> None:
        """Tells a stream that waits for a request that it was cancelled."""
        if sequence.inbox is not self._undelivered:
            logprobs: list[float] | None = [] if sequence.kept.logprobs else None
            sequence.inbox.append(StepOutput(sequence.request_id, [], output, logprobs))

    def _cancel(self, sequence: Sequence) -> RequestOutput:
        output = self._leave(sequence, FinishReason.CANCELLED)
        self._tell(sequence, output)
        return output

    def _cancel_all(self) -> None:
        """Takes every request out and frees all memory, also what an interrupt has left half moved."""
        self._last = None  # first: what is dropped is of no use, also if an interrupt strikes meanwhile
        self._executor.drain()
        self._undelivered.clear()
        for sequence in self._unfinished():
            self._speculator.forget(sequence)
            self._tell(sequence, self._output(sequence, FinishReason.CANCELLED))
        self._scheduler.clear()

    def _take_candidates(self, row: RequestRows, price: Callable[[float], float]) -> None:
        """Gives a request that did not verify what was drafted for it beside the round."""
        sequence = row.sequence
        if row.error is not None:
            self._end_with_error(row)
            return
        sequence.candidates = row.next_candidates
        if row.draft_failed and not sequence.candidates.tokens:
            self._speculator.judge(row, price)

    def _end_with_error(self, row: RequestRows) -> None:
        sequence, error = row.sequence, row.error
        cancelled = self._leave(sequence, FinishReason.CANCELLED)
        sequence.inbox.append(StepOutput(sequence.request_id, [], cancelled, error=error))

    def _commit(self, row: RequestRows, spec: RoundSpec, price: Callable[[float], float]) -> None:
        """Moves the request to where the round brought it."""
        sequence = row.sequence
        if row.error is not None:
            self._end_with_error(row)
            return
        row.kv.length += row.committed
        row.kv.streamed += next(s.offload for s in spec.seats if s.seat == sequence.seat)
        if not row.prompt:
            sequence.metrics.count_verification(len(row.candidates.tokens), row.accepted)
            self._speculator.judge(row, price)
        if not row.logits:
            return
        sequence.tokens += row.produced
        sequence.token_scores.add(row.token_scores)
        sequence.candidates = row.next_candidates
        output = self._leave(sequence, row.finish_reason) if row.finish_reason else None
        logprobs = row.token_scores.logprobs if sequence.kept.logprobs else None
        sequence.inbox.append(StepOutput(sequence.request_id, row.produced, output, logprobs))
