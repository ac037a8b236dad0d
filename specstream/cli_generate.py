"""`specstream generate`: prompts from the command line, a file, stdin or JSONL; text as it comes, or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from specstream.cli import UsageError, chosen_options, metrics_dict, traced
from specstream.errors import SpecStreamError
from specstream.options import SELF, format_size
from specstream.text_stream import TextStream, decode

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from specstream.engine import Engine
    from specstream.outputs import RequestOutput

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Flags that set the field of GenerationConfig of the same name."""


@dataclass
class Request:
    """A prompt, where it came from, and what has been generated for it."""

    prompt: str
    max_new_tokens: int
    origin: str = "prompt"
    """For messages: "prompt", or a file and line."""
    output: RequestOutput | None = None
    """Once it has ended."""


def run(given: argparse.Namespace) -> int:
    options = chosen_options(given)
    target, draft = _model(given.target), _draft(given.draft)
    requests = read_requests(given)
    with closing(_compile(target, draft, given.dtype, given.device, options)) as engine, traced(engine, given):
        if engine.tokenizer is None:
            raise SpecStreamError(f"{target} has no tokenizer, so there is no way from text to tokens")
        settings = settings_of(given, engine)
        started = start(engine, requests, settings, given.seed, given.chat)
        if given.jsonl is not None:
            write_jsonl(engine, started, sys.stdout)
        elif given.json:
            (request,) = requests
            for _ in progress(engine, started):
                pass
            engine_metrics = {"engine_metrics": metrics_dict(engine.metrics())}
            print(json.dumps(result(engine, request) | engine_metrics, indent=2))
        else:
            stream_text(engine, started, sys.stdout)
        if not given.json:
            print(_summary(engine), file=sys.stderr)
    return 0


def settings_of(given: argparse.Namespace, engine: Engine) -> GenerationConfig:
    """The settings of all requests: what is given, over the model's own. A sampling flag turns sampling on."""
    from specstream.settings import SAMPLING, merge_settings

    chosen = {name: getattr(given, name) for name in SETTINGS if getattr(given, name) is not None}
    if given.greedy:
        chosen["do_sample"] = False
    elif given.do_sample or SAMPLING & chosen.keys():
        chosen["do_sample"] = True
    return merge_settings(engine.generation_config, **chosen)


def read_requests(given: argparse.Namespace) -> list[Request]:
    """The prompts asked for.

    Raises:
        UsageError: no prompt, an unreadable file, or a bad line of JSONL (named by its number).
    """
    if given.jsonl is not None:
        name = "<stdin>" if given.jsonl == "-" else given.jsonl
        lines = _read(given.jsonl).splitlines()
        requests = [
            _request_of_line(line, f"{name}:{number}", given.max_new_tokens)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        if not requests:
            raise UsageError(f"{name}: no prompts in it")
        return requests
    if given.prompt is not None:
        prompt = given.prompt
    elif given.prompt_file is None and sys.stdin.isatty():
        raise UsageError("no prompt: use --prompt, --prompt-file or --jsonl, or pipe one in")
    else:
        prompt = _read(given.prompt_file or "-").removesuffix("\n")  # editors and echo add one
    if not prompt:
        raise UsageError("the prompt is empty")
    return [Request(prompt, given.max_new_tokens)]


def _request_of_line(line: str, origin: str, max_new_tokens: int) -> Request:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{origin}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
        raise UsageError(f'{origin}: an object with "prompt", a text that is not empty, is expected')
    if unknown := sorted(entry.keys() - {"prompt", "max_new_tokens"}):
        raise UsageError(f'{origin}: unknown key {unknown[0]!r}; allowed: "prompt", "max_new_tokens"')
    most = entry.get("max_new_tokens", max_new_tokens)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise UsageError(f'{origin}: "max_new_tokens" is {most!r}; a positive whole number is expected')
    return Request(entry["prompt"], most, origin)


def _read(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        return text.removeprefix("\ufeff")  # a byte order mark, as some editors write it
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text: {error}"
        raise UsageError(f"{name}: {reason}") from error


def _model(name: str) -> str:
    """A model's name or folder. What can only be a folder must be one."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.absolute() if str(folder) == SELF else folder)
    if name.startswith((".", "/", "~")) or folder.exists():
        raise UsageError(f"{name}: no such folder")
    return name


def _draft(name: str) -> str | None:
    if name.lower() == "none":
        return None
    return name if name == SELF else _model(name)


def _compile(target: str, draft: str | None, dtype: str | None, device: str | None, options: dict[str, Any]) -> Engine:
    import torch
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers.utils import logging

    import specstream

    set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return specstream.compile(target, draft, dtype=getattr(torch, dtype) if dtype else None, device=device, **options)


def start(
    engine: Engine, requests: list[Request], settings: GenerationConfig, seed: int | None, chat: bool
) -> dict[int, Request]:
    """Submits the requests, the first with the seed and each later one with the next.

    Returns:
        The requests in their order, by the engine's ids.
    """
    started: dict[int, Request] = {}
    for index, request in enumerate(requests):
        try:
            prompt_ids = _encode(engine.tokenizer, request.prompt, chat)
            request_id = engine.submit(
                prompt_ids,
                max_new_tokens=request.max_new_tokens,
                generation_config=settings,
                seed=None if seed is None else seed + index,
            )
        except SpecStreamError as error:
            raise UsageError(f"{request.origin}: {error}") from error
        started[request_id] = request
    return started


def progress(engine: Engine, started: dict[int, Request]) -> Iterator[tuple[Request, list[int]]]:
    """Runs the requests to their ends; yields each one's new tokens as they come, none after its last."""
    while engine.has_unfinished:
        for step in engine.step():
            request = started[step.request_id]
            request.output = step.output
            yield request, step.new_token_ids


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(prompt).input_ids)
    if not tokenizer.chat_template:
        raise UsageError("--chat: the target's tokenizer has no chat template")
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def result(engine: Engine, request: Request) -> dict[str, Any]:
    """A request that has ended, for JSON."""
    output = request.output
    assert output is not None
    return {
        "text": decode(engine.tokenizer, output.token_ids),
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "metrics": metrics_dict(output.metrics),
    }


def write_jsonl(engine: Engine, started: dict[int, Request], out: TextIO) -> None:
    """A line a request, in the order asked, each as soon as it and all before it have finished."""
    requests = list(started.values())
    written = 0
    for _ in progress(engine, started):
        while written < len(requests) and requests[written].output is not None:
            print(json.dumps(result(engine, requests[written])), file=out, flush=True)
            written += 1


def stream_text(engine: Engine, started: dict[int, Request], out: TextIO) -> None:
    """The text of the one request, as it comes."""
    stream = TextStream(engine.tokenizer)
    for _, token_ids in progress(engine, started):
        print(stream.push(token_ids), end="", file=out, flush=True)
    print(stream.finish(), file=out, flush=True)


def _summary(engine: Engine) -> str:
    metrics = engine.metrics()
    parts = [f"{metrics.generated_tokens} tokens", f"{metrics.tokens_per_second:.1f} tokens/s"]
    if metrics.num_draft_tokens:
        parts.append(f"mean acceptance length {metrics.mean_acceptance_length:.2f}")
    parts.append(f"{format_size(metrics.streamed_bytes)} of KV streamed in {metrics.num_rounds} rounds")
    return ", ".join(parts)
