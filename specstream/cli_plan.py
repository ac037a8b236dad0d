"""`specstream plan`: what it accepts, and the table it shows. Like `cli`, it imports torch only when it runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

from specstream.cli import DTYPES, OPTION_NAMES, add_command, add_option_flags, as_flags, positive

if TYPE_CHECKING:
    from specstream.fit_report import FitReport

SIZES = ("max_model_len", "max_num_seqs")
"""Options that are --context and --batch here."""


def add_plan(commands: Any) -> None:
    plan = add_command(
        commands,
        "plan",
        _run,
        "whether models fit on a device, and how fast they would be: without weights, without it",
    )
    models = plan.add_argument_group("models", "a preset, the directory of a checkpoint, or its config.json")
    models.add_argument("--target", required=True, metavar="PRESET|DIR|FILE", help="the model whose text you want")
    models.add_argument(
        "--draft", default="none", metavar="...|self|none", help="the model that proposes; self: the target (none)"
    )
    models.add_argument("--dtype", choices=DTYPES, help="of both (presets bfloat16, else what config.json says)")
    wanted = plan.add_argument_group("what is planned")
    wanted.add_argument(
        "--context", type=positive, required=True, metavar="N", help="tokens of a request, its output too"
    )
    wanted.add_argument("--batch", type=positive, default=1, metavar="N", help="requests that run at once (1)")
    wanted.add_argument(
        "--device", default="h200", metavar="NAME", help="a listed device, or auto: this machine's (h200)"
    )
    wanted.add_argument("--fit-gpu", metavar="SIZE", help="device memory in place of the device's own")
    wanted.add_argument(
        "--acceptance",
        type=_acceptance,
        default=0.8,
        metavar="P|P:P",
        help="the chance that a candidate is right if those before it are, or a range (0.8)",
    )
    for name, what in (
        ("max-context", "the longest context that fits"),
        ("max-batch", "the most requests that fit at once"),
        ("min-gpu", "the listed device with the least memory on which it fits"),
    ):
        wanted.add_argument(f"--{name}", action="store_true", help=f"also find {what}, all else being as given")
    plan.add_argument("--json", metavar="FILE", help="write the figures there too; - for stdout and nothing else")
    plan.add_argument("--trace", metavar="DIR", help="write the planned round there, for tensorboard --logdir DIR")
    plan.add_argument("--png", metavar="FILE", help="draw the planned round there")
    add_option_flags(plan, [name for name in OPTION_NAMES if name not in SIZES])


def _acceptance(text: str) -> float | tuple[float, float]:
    try:
        given = [float(part) for part in text.split(":")]
    except ValueError:
        given = []
    if not 1 <= len(given) <= 2 or not all(0 <= each <= 1 for each in given) or given[0] > given[-1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1, and no range of such: 0.6:0.9")
    return given[0] if len(given) == 1 else (given[0], given[1])


def _run(given: argparse.Namespace) -> int:
    import torch

    from specstream.bench_report import report
    from specstream.fit import plan

    options = {name: getattr(given, name) for name in OPTION_NAMES if name != "debug" and hasattr(given, name)}
    answer = plan(
        given.target,
        None if given.draft.lower() == "none" else given.draft,
        context=given.context,
        batch=given.batch,
        device=given.device,
        acceptance=given.acceptance,
        fit_gpu=given.fit_gpu,
        dtype=getattr(torch, given.dtype) if given.dtype else None,
        max_context=given.max_context,
        max_batch=given.max_batch,
        min_gpu=given.min_gpu,
        **options,
    )
    rows = {name: as_flags(text, given) for name, text in table_rows(answer).items()}
    report(title(answer), rows, answer.figures(), given.json)
    if answer.fits:
        _show_round(answer, given.trace, given.png)
    elif given.trace is not None or given.png is not None:
        print("specstream: it does not fit, so there is no round to show", file=sys.stderr)
    return 0


def _show_round(answer: FitReport, folder: str | None, picture: str | None) -> None:
    from specstream.errors import InvalidOption
    from specstream.fit_trace import planned_run, trace_plan

    if picture is not None:
        from specstream.traces.picture import save_picture

        info, planned = planned_run(answer)
        try:
            save_picture(picture, planned, info)
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise InvalidOption("png", picture, allowed) from error
    if folder is None:
        return
    try:
        run = trace_plan(answer, folder)
    except InvalidOption as error:
        raise error.renamed({"logdir": "trace"}) from error
    told = f"the planned round is in {run}; to look at it: tensorboard --logdir {shlex.quote(folder)}"
    print(f"specstream: {told}", file=sys.stderr)


def title(answer: FitReport) -> str:
    models = answer.target if answer.draft is None else f"{answer.target} with draft {answer.draft}"
    return f"{models}, {answer.batch} x {answer.context} tokens, on {answer.profile.title}"


def table_rows(answer: FitReport) -> dict[str, str]:
    """What is shown of an answer."""
    from specstream.fit_setup import MOST_CONTEXT

    rows = {"fits": "yes" if answer.fits else f"no: {answer.reason}"}
    if answer.short is not None:
        rows["short of"] = _short_text(answer)
    rows |= _memory_rows(answer)
    rows |= _prediction_rows(answer)
    if answer.max_context is not None:
        longest = f"{answer.max_context} tokens" if answer.max_context else "none fits"
        if answer.max_context == MOST_CONTEXT:
            longest = "as long as host memory lets it, which --host-kv-budget tells"
        rows["longest context"] = longest
    if answer.max_batch is not None:
        rows["most requests"] = str(answer.max_batch) if answer.max_batch else "not even one fits"
    if answer.min_gpu is not None:
        rows["smallest listed device"] = answer.min_gpu
    for name, texts in (("advice", answer.advice), ("note", answer.notes)):
        rows |= {name if not index else f"{name} {index + 1}": text for index, text in enumerate(texts)}
    return rows


def _short_text(answer: FitReport) -> str:
    from specstream.options import format_size

    short = answer.short
    assert short is not None
    why = "of the share that auto takes" if answer.options.gpu_kv_budget == "auto" else "by gpu_kv_budget"
    sizes = {f"device memory{f', {why}' if short.of_budget else ''}": short.device, "host memory": short.host}
    return " and ".join(f"{format_size(size)} of {name}" for name, size in sizes.items() if size)


def _memory_rows(answer: FitReport) -> dict[str, str]:
    from specstream.options import format_size

    use = answer.memory
    if use is None:
        return {}
    sizes = {
        "weights": use.weights,
        "draft weights": use.draft_weights,
        "draft KV": use.draft_kv,
        "draft distributions": use.drawn_from,
        "ring": use.ring,
        "tails": use.tails,
        "resident history": use.resident,
        "prompt buffer": use.prompt_buffer,
        "workspace": use.workspace,
    }
    rows = {f"  {name}": format_size(size) for name, size in sizes.items() if size}
    total = format_size(use.device)
    if use.capacity is not None:
        total += f" of {format_size(use.capacity)}"
    if use.left is not None and use.left >= 0:
        total += f"; {format_size(use.left)} left for what is not planned"
    budget = "" if use.host_budget is None else f" of {format_size(use.host_budget)}"
    device_is_short = answer.short is not None and answer.short.device
    return {"device memory, at least" if device_is_short else "device memory": total, **rows} | {
        "host memory": format_size(use.host) + budget
    }


def _prediction_rows(answer: FitReport) -> dict[str, str]:
    round_ = answer.prediction
    if round_ is None:
        return {}
    rows = {"a round": f"{round_.round_ms:.2f} ms, bound by {round_.bound_by}"}
    if round_.rounds > 1:
        rows["a round"] += f"; {round_.rounds} verify every request once"
    if round_.link_utilization is not None:
        rows["link"] = f"{round_.link_floor_ms:.2f} ms for what streams: {round_.link_utilization:.0%} busy"
    else:
        rows["link"] = "nothing streams"
    if answer.drafts:
        hidden, exposed = round_.hidden_draft_ms, round_.exposed_draft_ms
        chosen = f"{answer.options.num_speculative_tokens} candidates, {answer.options.drafting}"
        rows["drafting"] = f"{chosen}: {hidden:.2f} ms hidden, {exposed:.2f} ms exposed"
        if round_.foreseen is not None:
            shares = " to ".join(f"{share:.0%}" for share in round_.foreseen)
            rows["drafting"] += f"; {shares} of outcomes foreseen"
    rates = " to ".join(f"{rate:.1f}" for rate in round_.tokens_per_second)
    at = " to ".join(f"{chance:g}" for chance in answer.acceptance)
    rows["tokens/s"] = f"{rates}, at acceptance {at}" if answer.drafts else rates
    return rows
