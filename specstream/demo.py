"""`specstream demo`: questions about facts far back in a long text, with the bundled pair.

The KV budget is small, so most of the history streams from host memory in every round, and every token is
compared with the target alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specstream.cli import chosen_options, metrics_dict, traced
from specstream.demo_context import (
    BUDGET_SHARE,
    Question,
    kv_bytes_per_token,
    load_model,
    load_tokenizer,
    make_questions,
)
from specstream.demo_display import Display
from specstream.models.tiny import DRAFT, TARGET

if TYPE_CHECKING:
    from specstream.engine import Engine

CHUNK_TOKENS = 64
"""Smaller than for a large model, so that a small context has many chunks."""


@dataclass(frozen=True)
class Answer:
    """What followed a question, from SpecStream and from the target alone."""

    question: Question
    text: str
    value: str | None
    """The answer that the text states, if it states one."""
    token_ids: list[int]
    reference_token_ids: list[int]
    reference_tokens_per_second: float

    @property
    def correct(self) -> bool:
        return self.value == self.question.value

    @property
    def first_difference(self) -> int | None:
        """The first position at which the two differ."""
        ours, reference = self.token_ids, self.reference_token_ids
        if ours == reference:
            return None
        same = [a == b for a, b in zip(ours, reference, strict=False)]
        return same.index(False) if False in same else len(same)


def run(given: argparse.Namespace) -> int:
    """The command.

    Returns:
        1 if a token differs from the target alone, else 0.
    """
    options = chosen_options(given)
    figures = demonstrate(given, options, Display(to_stderr=given.json == "-"))
    text = json.dumps(figures, indent=2)
    if given.json == "-":
        print(text)
    elif given.json is not None:
        Path(given.json).write_text(text + "\n", encoding="utf-8")
    return 0 if figures["identical"] else 1


def demonstrate(given: argparse.Namespace, options: dict[str, Any], display: Display) -> dict[str, Any]:
    """Asks every question, shows what happens, and returns the figures."""
    started = time.perf_counter()
    with display.working("loading the bundled pair"):
        import specstream

        target, draft, tokenizer = load_model(TARGET), load_model(DRAFT), load_tokenizer()
        reference = load_model(TARGET)  # a copy of its own, in the hands of transformers alone
    questions = make_questions(tokenizer, given.context, given.facts, given.seed)
    context = max(len(question.prompt_ids) for question in questions)
    longest = context + given.max_new_tokens
    defaults = {
        "max_model_len": longest,
        "max_num_seqs": 1,
        "chunk_tokens": CHUNK_TOKENS,
        "gpu_kv_budget": kv_bytes_per_token(target) * longest // BUDGET_SHARE,
    }
    with display.working("capturing the models"):
        try:
            engine = specstream.compile(target, draft, **(defaults | options))
        except specstream.OutOfBudget:
            if "gpu_kv_budget" in options:
                raise
            # a context so short that a share of its KV is less than what works
            engine = specstream.compile(target, draft, **(defaults | options | {"gpu_kv_budget": "min"}))
    answers = []
    with closing(engine), traced(engine, given):
        display.models(target, draft)
        display.context(context, questions, engine.memory)
        display.plan(engine.plan)
        for question in questions:
            with display.working(f"reading {len(question.prompt_ids):,} tokens, then: {question.key}?"):
                answers.append(ask(engine, reference, tokenizer, question, given.max_new_tokens))
            display.answer(answers[-1])
        figures = summarise(answers, engine) | {"seconds": time.perf_counter() - started}
    display.figures(figures)
    return figures


def ask(engine: Engine, reference: Any, tokenizer: Any, question: Question, max_new_tokens: int) -> Answer:
    """The greedy continuation of a question, from the engine and from the reference model."""
    import torch

    from specstream.models.tiny.facts import parse_answer

    prompt = torch.tensor([question.prompt_ids])
    arguments = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
    }
    ours: Any = engine.generate(prompt, **arguments)
    clock = _Clock()
    alone = reference.generate(prompt, streamer=clock, **arguments)
    (token_ids, reference_token_ids) = (ids[0, prompt.shape[1] :].tolist() for ids in (ours, alone))
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Answer(question, text, parse_answer(text), token_ids, reference_token_ids, clock.tokens_per_second)


class _Clock:
    """A streamer that notes when tokens come: the prompt first, then one at a time."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, _: object) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: from the first new token to the last."""
        times = self._times[1:]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def summarise(answers: list[Answer], engine: Engine) -> dict[str, Any]:
    """The figures; those of the engine under the names that `Metrics` gives them."""
    speeds = [answer.reference_tokens_per_second for answer in answers]
    return {
        "identical": all(answer.first_difference is None for answer in answers),
        "tokens_compared": sum(len(answer.token_ids) for answer in answers),
        "recall_correct": sum(answer.correct for answer in answers),
        "recall_total": len(answers),
        "context_tokens": max(len(answer.question.prompt_ids) for answer in answers),
        "reference_tokens_per_second": sum(speeds) / len(speeds),
        "num_speculative_tokens": engine.options.num_speculative_tokens,
        **metrics_dict(engine.metrics()),
        "answers": [
            {
                "key": answer.question.key,
                "expected": answer.question.value,
                "answer": answer.value,
                "tokens_back": answer.question.tokens_back,
                "text": answer.text,
                "first_difference": answer.first_difference,
            }
            for answer in answers
        ],
        "versions": {name: version(name) for name in ("specstream", "torch", "transformers")},
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
