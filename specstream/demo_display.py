"""What the demo shows a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specstream.demo_context import TITLE, Question
from specstream.options import format_size

if TYPE_CHECKING:
    from specstream.demo import Answer
    from specstream.memory import MemoryPlan
    from specstream.round_plan import Plan


class Display:
    """Prints the demo as it goes on."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Says what is going on: with a spinner on a terminal, as a line elsewhere."""
        if self._console.is_terminal:
            with self._console.status(text):
                yield
        else:
            self._console.print(f"[dim]... {escape(text)}[/]")
            yield

    def models(self, target: Any, draft: Any) -> None:
        sizes = [
            f"{model.config.num_hidden_layers} layers, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M"
            for model in (target, draft)
        ]
        self._console.print(f"[bold]target[/]   {sizes[0]} parameters; draft {sizes[1]}")

    def context(self, tokens: int, questions: list[Question], memory: MemoryPlan) -> None:
        self._console.print(
            f"[bold]context[/]  {tokens:,} tokens of {TITLE}, with {len(questions)} facts "
            f"{min(q.tokens_back for q in questions):,} to {max(q.tokens_back for q in questions):,} tokens back"
        )
        self._console.print(
            f"[bold]KV[/]       {format_size(memory.full_kv)}; the device holds {format_size(memory.device_kv)}"
        )

    def plan(self, plan: Plan) -> None:
        self._console.print(f"\n[bold]A round, as planned:[/] [dim]{escape(str(plan))}[/]\n")

    def answer(self, answer: Answer) -> None:
        expected, value = answer.question.value, answer.value
        verdict = "[green]right[/]" if answer.correct else f"[red]{value or 'this'} is wrong[/], {expected} was stated"
        if answer.first_difference is not None:
            verdict += f"; [red]differs from the target alone from token {answer.first_difference} on[/]"
        question = escape(f"[{answer.question.key}:")
        text = "".join(c if c.isprintable() else " " for c in answer.text)
        self._console.print(
            f"[bold]{question}[/]{escape(' ' + ' '.join(text.split()))}\n"
            f"    [dim]stated {answer.question.tokens_back:,} tokens back:[/] {verdict}"
        )

    def figures(self, figures: dict[str, Any]) -> None:
        same = "[green]yes[/]" if figures["identical"] else "[red]no[/]"
        share = figures["device_kv_bytes"] / figures["full_kv_bytes"]
        rows = {
            "tokens equal to the target alone": f"{same}, {figures['tokens_compared']} compared",
            "facts recalled": f"{figures['recall_correct']} of {figures['recall_total']}",
            "KV on the device": f"{format_size(figures['device_kv_bytes'])}, {share:.0%} of all of it",
            "streamed a round": format_size(figures["streamed_bytes_per_round"]),
            "mean acceptance length": f"{figures['mean_acceptance_length']:.2f} "
            f"of at most {figures['num_speculative_tokens'] + 1}",
            "tokens/s": f"{figures['tokens_per_second']:.1f}",
            "the target alone, nothing offloaded": f"{figures['reference_tokens_per_second']:.1f}",
            "seconds in all": f"{figures['seconds']:.0f}",
        }
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in rows.items():
            table.add_row(f"[bold]{name}[/]", value)
        self._console.print()
        self._console.print(table)
        self._console.print(
            "[dim]On a CPU there is no link to keep busy: this shows that streaming is exact, not that it is fast.[/]"
        )
