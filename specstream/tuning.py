"""`engine.tune()`: the fastest settings for this machine, these models and a workload, by measuring a few."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specstream.bench_machine import give_memory_back
from specstream.caller import warn_caller
from specstream.depth import expected_tokens
from specstream.errors import InvalidOption, MissingExtra, OutOfBudget, shortened
from specstream.options import Options
from specstream.parts import EngineParts, planning_of
from specstream.planning import Planning
from specstream.policy import period_us, usual_round, verified_us
from specstream.profile_cache import WAY_OUT
from specstream.rehearsal import rehearse
from specstream.settings_search import Search, best_of
from specstream.trial import Stopwatch, Trial
from specstream.tuned_cache import store_tuned, stored_tuned, tuned_file
from specstream.tuned_settings import OF_TARGET, WINDOW, TunedSettings, changes, open_settings
from specstream.workload import Workload

if TYPE_CHECKING:
    from specstream.engine import Engine
    from specstream.traces.hparams import HParamsLog

MOST_TRIALS, MOST_SECONDS = 12, 90.0
NEW_TOKENS = 1024
"""More than a trial decodes of a prompt."""
Told = Callable[[Trial], None]


@dataclass(frozen=True)
class Tuning:
    """What was measured, and which settings the engine goes on with."""

    workload: Workload
    """With texts, their acceptance is that of the first trial."""
    trials: tuple[Trial, ...]
    """In the order in which they were measured; the first one, and the last if others were faster, have what the engine
    would choose untuned."""
    best: Trial | None
    """None if no trial succeeded, or if it did not come to what is stored from before, which stays."""
    file: Path | None
    """Where the settings are kept, from which other engines like this one take them; None if they are not kept."""

    @property
    def gain(self) -> float | None:
        """How many times as fast the best settings are as untuned ones; None if either could not be measured."""
        untuned = best_trial([trial for trial in self.trials if trial.settings == self.trials[0].settings])
        best, before = (trial and trial.tokens_per_second for trial in (self.best, untuned))
        return best / before if best and before else None

    def __str__(self) -> str:
        lines = [f"{trial}{'  <- best' if trial is self.best else ''}" for trial in self.trials]
        return "\n".join([f"tuned for {self.workload}", *lines])


def tune(
    engine: Engine,
    *,
    context: int | None = None,
    batch: int | None = None,
    acceptance: float | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    seconds: float = MOST_SECONDS,
    most_trials: int = MOST_TRIALS,
    logdir: str | Path | None = None,
    told: Told | None = None,
) -> Tuning:
    """Finds the fastest values of the options that were left at "auto", and has the engine go on with them.

    Those are chunk_tokens, group_chunks, staging_slots, num_speculative_tokens, drafting and lookahead_branches. Each
    trial is an engine of its own, which decodes requests with a random history for a few rounds; the first one has what
    would be chosen untuned, the second one what is stored, if anything is. No greedy and no coupled token depends on
    what is found, nor the distribution of any other sample. What is found is stored: engines that are compiled with the
    same options for models of the same shapes use it.

    Args:
        context, batch: tokens of each request and requests; None: max_model_len and max_num_seqs.
        acceptance: the chance that a candidate is right if those before it are; None: 0.8.
        prompts: token ids of texts like those to come, one for each request, as lists, arrays or tensors. Trials decode
            them greedily, so that acceptance is theirs, which also decides on a draft_window of "auto". Of a prompt
            that leaves less room in `context` than a trial decodes only the last tokens count. `context` is then by
            itself what the longest needs, as far as max_model_len goes. None: histories are random, and acceptance is
            made up.
        seconds: no trial begins, but for the first, that may end later.
        most_trials: how many there are, at most.
        logdir: where trials are written for TensorBoard's HParams; None: nowhere.
        told: is called after each trial.

    Raises:
        InvalidOption: a value out of range, or nothing that is left to be chosen; requests that are waiting or run,
            whose history is laid out in chunks.
        OutOfBudget: not even untuned settings fit any more; the engine is closed then.
        OSError: a trial could not be written to the logdir.
        MissingExtra: a logdir without TensorBoard.
        KeyboardInterrupt: of Ctrl-C. What was measured before counts. Another one, while the engine is made again,
            leaves it closed.
    """
    parts = engine.parts
    if prompts is not None:
        if acceptance is not None:
            raise InvalidOption("acceptance", acceptance, "None with prompts", "It is measured then; leave it out.")
        prompts = _token_lists(prompts)
        context, batch = _sizes(engine, prompts, context, batch)
    workload = Workload.of(engine.options, engine.memory, context, batch, acceptance)
    _check(engine, seconds, most_trials, told, texts=prompts is not None)
    log = None if logdir is None else _log(logdir)
    trials = list[Trial]()

    def note(trial: Trial) -> None:
        trials.append(trial)
        if log is not None:
            log.add(trial.settings.words, trial.figures)
        if told is not None:
            told(trial)

    try:
        parts.close()  # each trial has the memory for itself
        give_memory_back()
        with engine.calling_out():
            measure_trials(parts, workload, prompts, seconds, most_trials, note)
    finally:  # an interrupt leaves what was measured before it
        best = best_trial(trials)
        known = None if best is None else stored_tuned(parts.requested, parts.target, parts.draft)
        if known is not None and known not in [trial.settings for trial in trials]:
            best = None  # nobody knows whether it is better than what is stored
        file = None if best is None else _stored(best, parts)
        engine.use_anew(None if best is None else best.settings)
    if (measured := trials[0].acceptance) is not None:
        workload = replace(workload, acceptance=measured)
    return Tuning(workload, tuple(trials), best, file)


def measure_trials(
    parts: EngineParts,
    workload: Workload,
    prompts: Sequence[Sequence[int]] | None,
    seconds: float,
    most_trials: int,
    note: Callable[[Trial], None],
) -> None:
    """Measures settings until no change of one helps, or the time is up; `note` is called after each trial.

    Raises:
        OutOfBudget: not even untuned settings fit.
    """
    started, longest, requested = time.monotonic(), 0.0, parts.requested
    planning = planning_of(requested, parts.target, parts.draft)
    stopwatch = Stopwatch(requested, parts.target, parts.draft, workload, parts.streams, prompts=prompts)
    count, accepted, predicted = 0, workload.acceptance, dict[tuple[TunedSettings, float], float | None]()

    def predict(settings: TunedSettings) -> float | None:
        known = settings, accepted
        if known not in predicted:
            predicted[known] = None
            with suppress(OutOfBudget):
                here = replace(workload, acceptance=accepted)
                predicted[known] = predicted_rate(settings.given_to(requested), planning, here)
        return predicted[known]

    def measure(settings: TunedSettings, best: float) -> float | None:
        nonlocal accepted, count, longest
        begun, rate, error = time.monotonic(), None, ""
        try:
            rate = stopwatch.rate(settings, best)
        except Exception as failure:  # memory above all; the other settings are measured
            error = shortened(str(failure)) or type(failure).__name__
        give_memory_back()
        if count == 0:
            accepted = stopwatch.acceptance or accepted
        count += 1
        took = time.monotonic() - begun
        longest = max(longest, took)
        note(Trial(settings, predict(settings), rate, took, error, stopwatch.acceptance))
        return rate

    def may_go_on(last: bool = False) -> bool:
        left = most_trials - count
        return left > (not last and count > 1) and time.monotonic() + longest - started < seconds

    start, known = TunedSettings.chosen(requested, planning), stored_tuned(requested, parts.target, parts.draft)
    search = Search(predict, measure, may_go_on)
    search.run([start] if known is None else [start, known], changes(requested, planning, texts=prompts is not None))
    if search.best not in (None, start) and may_go_on(last=True):
        measure(start, 0.0)  # once more: whatever a process does for the first time fell on its first trial


def predicted_rate(options: Options, planning: Planning, workload: Workload) -> float:
    """Tokens a second that an engine of options without "auto" is predicted to give.

    Raises:
        OutOfBudget: memory that does not suffice.
    """
    memory, planner = planning.planned(options)
    if rehearse(replace(memory, max_model_len=workload.context), workload.batch).running < workload.batch:
        raise OutOfBudget(f"there is no room for {workload.batch} requests of {workload.context} tokens at a time")
    by_turns = options.drafting == "cohorts" and workload.batch > 1
    drafting = options.drafting if by_turns or options.drafting != "cohorts" else "sequential"
    here = replace(options, max_num_seqs=workload.batch, drafting=drafting)
    memory = replace(memory, max_model_len=workload.context)
    if planning.draft is None:
        return 1e6 * workload.batch / period_us(planner, replace(usual_round(here, memory), draft_steps=0))
    tokens = workload.batch * expected_tokens(workload.acceptance, options.most_candidates)
    return 1e6 * tokens / verified_us(here, memory, planner, workload.acceptance)


def best_trial(trials: list[Trial]) -> Trial | None:
    """The fastest one; an earlier one unless it is clearly slower. Of two with the same settings the faster counts."""
    fastest: dict[TunedSettings, Trial] = {}
    for trial in trials:
        before = fastest.get(trial.settings, trial)
        fastest[trial.settings] = max(before, trial, key=lambda each: each.tokens_per_second or 0.0)
    best = best_of({settings: trial.tokens_per_second for settings, trial in fastest.items()})
    return None if best is None else fastest[best]


def _check(engine: Engine, seconds: Any, most_trials: Any, told: Any, *, texts: bool) -> None:
    """Raises InvalidOption for what cannot be tuned, or not now."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise InvalidOption("seconds", seconds, "a positive number")
    if isinstance(most_trials, bool) or not isinstance(most_trials, int) or most_trials < 1:
        raise InvalidOption("most_trials", most_trials, "a positive integer")
    if told is not None and not callable(told):
        raise InvalidOption("told", told, "a function of a Trial, or None")
    if unfinished := len(engine._unfinished()):
        way_out = "Run them to their ends, or cancel them; chunk sizes lay out the memory that they are in."
        raise InvalidOption("tune", f"{unfinished} requests that wait or run", "an engine without requests", way_out)
    if engine.recorder is not None:
        raise InvalidOption("tune", "an engine that is traced", "one that is not", "Leave the trace first.")
    names: tuple[str, ...] = OF_TARGET
    if engine.parts.draft is not None:
        names = tuple(field.name for field in fields(TunedSettings) if texts or field.name != WINDOW)
    if not set(names) & set(open_settings(engine.parts.requested)):
        allowed = f'at least one of {", ".join(names)} left at "auto"'
        raise InvalidOption("tune", "an engine whose settings are all given", allowed, "Compile without some of them.")


def _token_lists(prompts: Any) -> list[list[int]]:
    """Prompts as lists, whether they are lists, tuples, arrays or tensors.

    Raises:
        InvalidOption: they are neither.
    """
    allowed = "a list of prompts, each a list of token ids"
    found = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(found, list | tuple) or not found:
        way_out = "Give its input_ids." if isinstance(prompts, Mapping) else ""
        given = "none" if isinstance(found, list | tuple) else f"a {type(prompts).__name__}"
        raise InvalidOption("prompts", given, allowed, way_out)
    lists = [each.tolist() if hasattr(each, "tolist") else each for each in found]
    for each in lists:
        if not isinstance(each, list | tuple):
            way_out = "Put a single prompt into a list." if isinstance(each, int) else ""
            raise InvalidOption("prompts", f"a {type(each).__name__} among them", allowed, way_out)
    return [list(each) for each in lists]


def _sizes(engine: Engine, prompts: Sequence[Sequence[int]], context: int | None, batch: int | None) -> tuple[int, int]:
    """Tokens of a request and how many there are, for these prompts.

    Raises:
        InvalidOption: prompts that requests cannot have, or another number of them.
    """
    most, longest = engine.options.max_num_seqs, engine.memory.max_model_len
    if len(prompts) > most or batch not in (None, len(prompts)):
        wanted = f"at most {most}, the engine's max_num_seqs" if batch is None else f"as many as batch={batch}"
        raise InvalidOption("prompts", f"{len(prompts)} prompts", wanted)
    for prompt in prompts:
        engine.make_request(prompt[-longest + 1 :], [], max_new_tokens=1)
    needed = max(map(len, prompts)) + NEW_TOKENS
    return min(needed, longest) if context is None else context, len(prompts)


def _log(logdir: str | Path) -> HParamsLog:
    try:
        from specstream.traces.hparams import HParamsLog
    except ImportError as error:
        raise MissingExtra("logs of trials", "tensorboard", "tensorboard") from error
    return HParamsLog(logdir, datetime.now(timezone.utc).strftime("tune_%Y-%m-%d_%H-%M-%S"))


def _stored(best: Trial, parts: EngineParts) -> Path | None:
    file = tuned_file(parts.requested, parts.target, parts.draft)
    assert best.tokens_per_second is not None
    try:
        store_tuned(best.settings, best.tokens_per_second, parts.target.spec, file)
    except OSError as error:
        warn_caller(f"what was tuned cannot be stored ({error}), only used by this engine: {WAY_OUT}")
        return None
    return file
