"""`specstream tune`: what it accepts, and the table it shows. Like `cli`, it imports torch only when it runs."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specstream.cli import DTYPES, OPTION_NAMES, UsageError, add_command, add_option_flags, chosen_options, positive
from specstream.cli_bench import add_device

if TYPE_CHECKING:
    from specstream.bench_report import Progress
    from specstream.engine import Engine
    from specstream.trial import Trial
    from specstream.tuning import Tuning

SIZES = ("max_model_len", "max_num_seqs")
"""Options that are --context and --batch here."""
FLAGS = {
    "max_model_len": "context",
    "max_num_seqs": "batch",
    "preset": "target",
    "logdir": "trace",
    "most_trials": "trials",
}
"""Arguments that are flags of another name here."""
NOT_TUNED = ("rejection_sample_method", "synthetic_acceptance_rate", "synthetic_acceptance_length")


def add_tune(commands: Any) -> None:
    tune = add_command(
        commands,
        "tune",
        _run,
        'measure which settings are the fastest here, for options that say "auto"; engines use them from then on',
    )
    models = tune.add_argument_group("models", "weights do not matter: what is found is for all models of these shapes")
    models.add_argument("--target", required=True, metavar="PRESET|DIR", help="a shape of random weights, or a folder")
    models.add_argument(
        "--draft", default="none", metavar="PRESET|DIR|self|none", help="what proposes; self: the target (none)"
    )
    models.add_argument("--dtype", choices=DTYPES, help="of both (bfloat16, on a CPU float32)")
    wanted = tune.add_argument_group("workload")
    wanted.add_argument(
        "--context", type=positive, required=True, metavar="N", help="tokens of a request, and the max_model_len"
    )
    wanted.add_argument("--batch", type=positive, default=1, metavar="N", help="requests, and the max_num_seqs (1)")
    wanted.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="the chance that a candidate is right if those before it are (0.8); with --text it is measured",
    )
    wanted.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="a text whose parts trials continue, so that acceptance is its own; the target is a folder then, with a "
        "tokenizer and real weights",
    )
    limits = tune.add_argument_group("effort")
    limits.add_argument(
        "--seconds", type=positive, default=90, metavar="N", help="no trial begins that may end later (90)"
    )
    limits.add_argument("--trials", type=positive, default=12, metavar="N", help="at most (12)")
    tune.add_argument("--trace", metavar="DIR", help="write trials there, for tensorboard --logdir DIR, tab HPARAMS")
    add_device(tune)
    add_option_flags(tune, [name for name in OPTION_NAMES if name not in (*SIZES, *NOT_TUNED)])


def _run(given: argparse.Namespace) -> int:
    import torch

    import specstream
    from specstream.bench_generate import chosen_draft
    from specstream.bench_machine import choose_device
    from specstream.bench_report import Progress
    from specstream.bench_setup import bench_model, named_as_typed
    from specstream.options import SELF

    options = chosen_options(given) | {"max_model_len": given.context, "max_num_seqs": given.batch}
    device, progress = choose_device(given.device), Progress()
    dtype = getattr(torch, given.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    with named_as_typed(FLAGS):
        with progress.working(f"making and capturing {given.target} and draft {given.draft}"):
            target = bench_model(given.target, given.context, dtype, device)
            draft = chosen_draft(given, target, dtype, device)
            itself = draft is not None and draft.module is target.module
            chosen: Any = SELF if itself else draft and draft.module
            prompts = None if given.text is None else _prompts(given)
            engine = specstream.compile(target.module, chosen, **options)
        with closing(engine):
            trials: list[Trial] = []
            try:
                _report(_tuned(engine, given, prompts, progress, trials), given)
            except KeyboardInterrupt:
                if trials:
                    _report(_so_far(engine, given, trials), given)
                raise
    return 0


def _prompts(given: argparse.Namespace) -> list[list[int]]:
    """Parts of the text, one for each request, each as long as a request may be: what is decoded takes some of it."""
    from specstream.bench_text import text_prompts
    from specstream.models.load import load_tokenizer

    if not given.text.is_file():
        raise UsageError(f"--text: {given.text} is {'a folder' if given.text.is_dir() else 'no file'}")
    if not Path(given.target).is_dir():
        raise UsageError(f"--text needs the target's tokenizer, and {given.target} is no folder")
    tokenizer = load_tokenizer(given.target)
    if tokenizer is None or not tokenizer("a text").input_ids:
        raise UsageError(f"--text needs the target's tokenizer, and the folder {given.target} has none")
    try:
        return text_prompts(tokenizer, given.text, given.batch, given.context)
    except UsageError as error:
        raise UsageError(f"--text: {error}; give a longer one, or a smaller --context") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text: {given.text} is no text in UTF-8: {error.reason} at byte {error.start}") from error


def _so_far(engine: Engine, given: argparse.Namespace, trials: list[Trial]) -> Tuning:
    """What an interrupted tuning has come to."""
    from specstream.tuned_cache import tuned_file
    from specstream.tuning import Tuning, best_trial
    from specstream.workload import Workload

    acceptance = trials[0].acceptance if given.acceptance is None else given.acceptance
    workload = Workload.of(engine.options, engine.memory, None, None, acceptance)
    file = tuned_file(engine.parts.requested, engine.parts.target, engine.parts.draft)
    return Tuning(workload, tuple(trials), best_trial(trials), file if file.exists() else None)


def _tuned(
    engine: Engine,
    given: argparse.Namespace,
    prompts: list[list[int]] | None,
    progress: Progress,
    trials: list[Trial],
) -> Tuning:
    """Tunes; what is measured goes to `trials` as it comes."""

    def text() -> str:
        return f"trial {len(trials) + 1} of {given.trials} at most"

    with progress.listed(text()) as say:

        def told(trial: Trial) -> None:
            trials.append(trial)
            say(f"{len(trials):>2}  {trial}", text())

        return engine.tune(
            acceptance=given.acceptance,
            context=given.context,
            prompts=prompts,
            seconds=given.seconds,
            most_trials=given.trials,
            logdir=given.trace,
            told=told,
        )


def _report(tuning: Tuning, given: argparse.Namespace) -> None:
    from specstream.bench_report import report

    if not any(trial.tokens_per_second for trial in tuning.trials):
        raise UsageError(f"no trial succeeded; the first one: {tuning.trials[0].error}")
    rows = {f"{number:>2}": str(trial) for number, trial in enumerate(tuning.trials, 1)}
    before = "what was kept before, which is not among these"
    rows["best"] = before if tuning.best is None else str(tuning.best.settings)
    if len(tuning.trials) == 1:
        rows["than untuned"] = "nothing else was tried: time or trials were up, or nothing else is promising"
    elif tuning.gain is not None:
        rows["than untuned"] = f"{tuning.gain:.2f} x as fast"
    if given.text is None and getattr(given, "draft_window", None) == "auto":
        rows["draft window"] = "not tuned: that takes a text (--text)"
    rows["kept in"] = "no file" if tuning.file is None else str(tuning.file)
    report(f"{given.target}, draft {given.draft}, {tuning.workload}", rows, figures(tuning), given.json)


def figures(tuning: Tuning) -> dict[str, Any]:
    """A tuning for JSON."""
    return {
        "workload": asdict(tuning.workload),
        "trials": [asdict(trial) for trial in tuning.trials],
        "best": None if tuning.best is None else asdict(tuning.best.settings),
        "file": None if tuning.file is None else str(tuning.file),
    }
