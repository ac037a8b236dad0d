"""The `specstream` command: what it accepts, and how mistakes, errors and Ctrl-C end it.

Nothing here imports torch: a command does so when it runs, and `--help` answers at once.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specstream.errors import InvalidOption, MissingExtra, OutOfBudget, SpecStreamError, SpecStreamWarning
from specstream.options import Options

if TYPE_CHECKING:
    from specstream.engine import Engine

DTYPES = ("float64", "float32", "bfloat16", "float16")
OPTION_NAMES = tuple(field.name for field in fields(Options))
METAVARS = {"Size": "SIZE", "int": "N", "float": "X"}
"""By what an option's type contains."""
USAGE, FAILURE, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
EXIT_STATUS = (
    "Exit status: 0; 1 if the command failed; 2 if it was used wrongly, which includes options for which the memory "
    "does not suffice, but for plan, which then says so; 130 after Ctrl-C."
)


class UsageError(SpecStreamError):
    """The command line or an input file asks for something that cannot be done as written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit status: 0, 1 (the command failed), 2 (used wrongly) or 130 (interrupted).
    """
    given = make_parser().parse_args(arguments)
    try:
        check_output(given)
        with plain_warnings():
            return int(given.run(given))
    except KeyboardInterrupt:
        print("\nspecstream: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout, `head` for example, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if given.debug:
            raise
        print(f"specstream: error: {as_flags(one_line(error), given)}", file=sys.stderr)
        return USAGE if _is_usage(error, given) else FAILURE


def check_output(given: argparse.Namespace) -> None:
    """Refuses a --json, --png or --trace that cannot be written before anything is computed for it.

    Raises:
        UsageError: the file is a folder, or in none; the folder cannot be made, or written to.
        MissingExtra: nothing that draws is installed.
    """
    check_trace(getattr(given, "trace", None))
    check_picture(getattr(given, "png", None))
    name = getattr(given, "json", None)
    if not isinstance(name, str) or name == "-":
        return
    if not _can_be_file(name):
        raise UsageError(f"--json {name}: it has to be a file in a folder that can be written to, or - for stdout")


def check_picture(name: str | None) -> None:
    """As `check_output`, of --png."""
    if name is None:
        return
    if not _can_be_file(name) or os.path.splitext(name)[1].lower() != ".png":
        raise UsageError(f"--png {name}: it has to be a file that ends in .png, in a folder that can be written to")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("pictures of rounds", "matplotlib", "tensorboard")


def _can_be_file(name: str) -> bool:
    """Whether a file of that name is there and can be written to, or can be made."""
    folder, there = os.path.dirname(name) or ".", os.path.lexists(name)
    return os.path.isdir(folder) and not os.path.isdir(name) and os.access(name if there else folder, os.W_OK)


def check_trace(folder: str | None) -> None:
    """Raises UsageError if a folder for traces is there and cannot be written to, or cannot be made."""
    if folder is not None:
        there = os.path.abspath(os.path.expanduser(folder))
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not folder or not os.path.isdir(there) or not os.access(there, os.W_OK):
            raise UsageError(f"--trace {folder}: it has to be a folder that can be made or written to")


@contextmanager
def traced(engine: Engine, given: argparse.Namespace) -> Iterator[None]:
    """Records the engine's rounds if the command was told to, and says on stderr how to look at them."""
    if given.trace is None:
        yield
        return
    with ExitStack() as until_the_end:
        try:
            run = until_the_end.enter_context(engine.trace(given.trace))
        except InvalidOption as error:
            raise error.renamed({"logdir": "trace"}) from error
        told = f"specstream: rounds are in {run}; to look at them: tensorboard --logdir {shlex.quote(given.trace)}"
        until_the_end.callback(print, told, file=sys.stderr)
        yield


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows this package's warnings in a line: nobody who runs a command has a line of Python to look at."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def in_a_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, SpecStreamWarning):
                print(f"specstream: warning: {message}", file=sys.stderr)
            else:
                show(message, category, *place, **more)

        warnings.showwarning = in_a_line
        yield


def _is_usage(error: Exception, given: argparse.Namespace) -> bool:
    """Whether the command asked for what cannot be done; memory that does not suffice is that if options say how."""
    chose_memory = any(hasattr(given, field.name) for field in fields(Options) if field.name != "debug")
    return isinstance(error, UsageError | InvalidOption) or (isinstance(error, OutOfBudget) and chose_memory)


def as_flags(text: str, given: argparse.Namespace) -> str:
    """A message with options as they are typed on the command line: --gpu-kv-budget for gpu_kv_budget.

    A name of one word, such as draft, is an option only before a colon that begins the message or before "=".
    """
    names = {field.name for field in fields(Options)} | vars(given).keys()
    for name in sorted(names - {"run", "prompt"}, key=len, reverse=True):
        flag = f"--{name.replace('_', '-')}"
        word = rf"(?<![\w./\"'-]){name}(?![\w/\"'-]|\.\w)"
        text = re.sub(rf"{word}=True\b", flag, text)
        text = re.sub(rf"{word}=None\b", f"{flag} none", text)
        text = re.sub(rf"{word}=[\"']?(\w+)[\"']?", rf"{flag} \1", text)
        text = re.sub(word if "_" in name else rf"^{name}(?=: got)", flag, text)
    return text


def one_line(error: Exception) -> str:
    """What went wrong, in a line; what was not foreseen also says its type and how to learn more."""
    text = " ".join(str(error).split())
    if isinstance(error, SpecStreamError):
        return text
    if len(text) > 400:
        text = text[:400] + " ..."
    name = type(error).__name__
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"


def chosen_options(given: argparse.Namespace) -> dict[str, Any]:
    """The options of `specstream.compile` that were given, checked as far as no model is needed."""
    chosen = {f.name: getattr(given, f.name) for f in fields(Options) if hasattr(given, f.name)}
    if not given.debug:
        chosen.pop("debug", None)
    Options.from_keywords(getattr(given, "draft", None), **chosen)
    return chosen


def metrics_dict(metrics: Any) -> dict[str, Any]:
    """An engine's metrics for JSON: what it counted and what follows from that."""
    derived = [name for name, kind in vars(type(metrics)).items() if isinstance(kind, property)]
    return asdict(metrics) | {name: getattr(metrics, name) for name in derived}


def _demo(given: argparse.Namespace) -> int:
    from specstream.demo import run

    return run(given)


def _generate(given: argparse.Namespace) -> int:
    from specstream.cli_generate import run

    return run(given)


class Parser(argparse.ArgumentParser):
    """One that refuses what it does not know itself: a command's own usage is shown, and not that of `specstream`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"specstream {version('specstream')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="specstream",
        description="Exact speculative decoding with the target's KV cache streamed from CPU memory.",
        epilog=EXIT_STATUS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = add_command(commands, "demo", _demo, "answer questions over a long text with the bundled models")
    demo.add_argument("--context", type=positive, default=4096, metavar="N", help="tokens of text (4096)")
    demo.add_argument("--facts", type=positive, default=4, metavar="N", help="facts hidden in it (4)")
    demo.add_argument("--max-new-tokens", type=positive, default=32, metavar="N", help="tokens of each answer (32)")
    demo.add_argument("--seed", type=int, default=0, help="chooses the facts and where they stand (0)")
    demo.add_argument("--json", metavar="FILE", help="write the figures there; - for stdout and nothing else")
    add_trace_flag(demo)
    add_option_flags(demo)

    generate = add_command(commands, "generate", _generate, "continue prompts with any pair of models")
    models = generate.add_argument_group("models")
    models.add_argument("--target", required=True, metavar="DIR|NAME", help="the model whose text you want")
    models.add_argument(
        "--draft", default="none", metavar="DIR|NAME|self|none", help="the model that proposes; self: the target (none)"
    )
    models.add_argument(
        "--dtype", choices=DTYPES, help="of both models' weights (on a CPU float32, else the checkpoint's)"
    )
    models.add_argument("--device", choices=("cpu", "cuda"), help="where they run (a CUDA device if there is one)")
    prompts = generate.add_argument_group("prompts", "without one of these the prompt is read from stdin")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="FILE", help="a text file, less its last newline; - for stdin")
    source.add_argument(
        "--jsonl",
        metavar="FILE",
        help='a line {"prompt": "..."} a request, with "max_new_tokens": N if it has a limit of its own; answered in '
        "order; - for stdin",
    )
    prompts.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    choosing = generate.add_argument_group("choosing tokens", "what is not given comes from the model's own settings")
    way = choosing.add_mutually_exclusive_group()
    way.add_argument("--greedy", action="store_true", help="always the most likely token")
    way.add_argument("--do-sample", action="store_true", help="sample; implied by the flags for it")
    for name in ("temperature", "top-p", "min-p", "repetition-penalty"):
        choosing.add_argument(f"--{name}", type=float, metavar="X")
    choosing.add_argument("--top-k", type=int, metavar="N")
    choosing.add_argument("--seed", type=int, metavar="N", help="the same text every time")
    output = generate.add_argument_group("output")
    output.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="tokens a prompt at most (128)"
    )
    output.add_argument("--json", action="store_true", help="one JSON object instead of text as it comes")
    add_trace_flag(output)
    add_option_flags(generate)

    from specstream.cli_bench import add_bench  # here, since they need what this file defines
    from specstream.cli_plan import add_plan
    from specstream.cli_tune import add_tune

    add_plan(commands)
    add_tune(commands)
    add_bench(commands)
    return parser


def add_command(commands: Any, name: str, run: Any, purpose: str) -> argparse.ArgumentParser:
    """A command that calls `run`, or, if that is None, one with commands of its own."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=EXIT_STATUS,
        allow_abbrev=False,
    )
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def add_option_flags(parser: argparse.ArgumentParser, names: Sequence[str] = OPTION_NAMES) -> None:
    """One flag for each of these fields of `Options`, with the field's own description, and --debug."""
    group = parser.add_argument_group("options of specstream.compile")
    described = _field_docs(Options)
    for field in fields(Options):
        if field.name == "debug" or field.name not in names:
            continue
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_option_number if "float" in str(field.type) else _option_value,
            default=argparse.SUPPRESS,
            metavar=next((word for kind, word in METAVARS.items() if kind in str(field.type)), "WORD"),
            help=f"{described.get(field.name, '')} ({field.default})".replace("%", "%%"),
        )
    group.add_argument(
        "--debug", action="store_true", help=f"{described.get('debug', '')} Errors show where they arose."
    )


def add_trace_flag(parser: Any) -> None:
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help="record plans and rounds there, in a folder of the run's own; to look at them: tensorboard --logdir DIR",
    )


def _field_docs(dataclass: type) -> dict[str, str]:
    """The string below each field of a dataclass, in one line."""
    (definition,) = ast.parse(inspect.getsource(dataclass)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _option_value(text: str) -> int | str | None:
    """A number, nothing, or a word that `Options` will judge."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return None if text.lower() == "none" else text


def _option_number(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return _option_value(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
