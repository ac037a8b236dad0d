"""The demo's context and figures, with stand-ins for the models: a reader that finds facts, and one that lies."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specstream
from specstream import cli, demo, demo_context
from specstream.errors import InvalidOption
from specstream.metrics import Metrics
from specstream.models.tiny.facts import make_question
from specstream.options import Options


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, token_ids: list[int], **_: object) -> str:
        return bytes(token_ids).decode()


def test_context_is_long_enough_and_states_each_fact_once_far_back() -> None:
    questions = demo_context.make_questions(Bytes(), 4096, 4, seed=1)
    assert len({question.key for question in questions}) == 4
    for question in questions:
        text = bytes(question.prompt_ids).decode()
        statement = f"[{question.key}: {question.value}]"
        context, _, rest = text.rpartition("\n" + make_question(question.key))
        assert rest == ""
        assert 4096 <= len(context.encode()) < 4096 + 32
        assert context.count(statement) == 1
        assert context.index(statement) < 0.65 * len(context)
        assert 0.25 * len(context) < context.index(statement)
        after = text.partition(statement + "\n")[2]
        assert question.tokens_back == len(after.encode())


def test_same_seed_same_questions() -> None:
    first, again, other = (demo_context.make_questions(Bytes(), 1024, 2, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(("context", "facts", "name"), [(4096, 65, "facts"), (10**7, 4, "context")])
def test_impossible_contexts_are_refused(context: int, facts: int, name: str) -> None:
    with pytest.raises(InvalidOption, match=f"^{name}: .* at most"):
        demo_context.make_questions(Bytes(), context, facts, seed=0)


class Reader:
    """Answers a question as the context states it; stands in for the models and for the engine."""

    dtype = torch.float32
    config = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=1, num_attention_heads=2, hidden_size=8)
    plan = "[a plan]"
    memory = SimpleNamespace(full_kv=4096, device_kv=1024)
    options = Options()

    def __init__(self, answer: str | None = None) -> None:
        self.answer = answer

    def parameters(self) -> list[Tensor]:
        return [torch.zeros(500_000)]

    def generate(self, prompt: Tensor, max_new_tokens: int, streamer: Any = None, **ignored: object) -> Tensor:
        context, _, key = bytes(prompt[0].tolist()).decode().rpartition("[")
        answer = (self.answer or context.partition("[" + key)[2])[:max_new_tokens].encode()
        for token in (prompt, *answer) if streamer else ():
            streamer.put(token)
        return torch.tensor([prompt[0].tolist() + list(answer)])

    def metrics(self) -> Metrics:
        counted: dict[str, Any] = {field.name: 1 for field in fields(Metrics)}
        return Metrics(**counted | {"accepted_per_position": ()})

    def close(self) -> None:
        pass


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """The engine; the reference is right."""
    engine = Reader()
    monkeypatch.setattr(demo, "load_model", lambda _: Reader())
    monkeypatch.setattr(demo, "load_tokenizer", Bytes)
    monkeypatch.setattr(specstream, "compile", lambda *_, **__: engine, raising=False)
    return engine


def test_figures_when_all_is_well(pair: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert cli.main(["demo", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["identical"] is True
    assert (figures["recall_correct"], figures["recall_total"]) == (4, 4)
    assert figures["context_tokens"] >= 4096
    assert figures["tokens_compared"] == 4 * 32
    wanted = {"mean_acceptance_length", "num_speculative_tokens", "device_kv_bytes", "full_kv_bytes"}
    assert wanted | {"streamed_bytes_per_round", "tokens_per_second"} <= figures.keys()
    shown = capsys.readouterr().out
    assert "4 of 4" in shown
    assert "[a plan]" in shown
    for answer in figures["answers"]:
        assert answer["answer"] == answer["expected"]
        assert f"[{answer['key']}: {answer['expected']}]" in shown


def test_json_to_stdout_is_alone_there(pair: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--json", "-", "--facts", "2"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["recall_total"] == 2
    assert "2 of 2" in captured.err


def test_a_token_that_differs_fails(pair: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    pair.answer = " lies] and more of it, as long as the reference"
    assert cli.main(["demo"]) == 1
    shown = capsys.readouterr().out
    assert "differs from the target alone from token 1 on" in shown
    assert "0 of 4" in shown


def test_an_answer_cut_short_fails(pair: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    pair.answer = " "
    assert cli.main(["demo"]) == 1
    assert "differs from the target alone from token 1 on" in capsys.readouterr().out


def test_a_wrong_answer_alone_is_no_failure(
    pair: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.answer = " 12345678"
    monkeypatch.setattr(demo, "load_model", lambda _: Reader(" 12345678"))
    assert cli.main(["demo"]) == 0
    assert "0 of 4" in capsys.readouterr().out


def test_options_override_the_demo(pair: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(*_: object, **options: object) -> Reader:
        seen.update(options)
        return pair

    monkeypatch.setattr(specstream, "compile", spy, raising=False)
    assert cli.main(["demo", "--gpu-kv-budget", "min", "--num-speculative-tokens", "2"]) == 0
    assert seen["gpu_kv_budget"] == "min"
    assert seen["num_speculative_tokens"] == 2
    assert seen["max_num_seqs"] == 1


def test_bundled_pair_recalls_what_has_left_the_device(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    asked = ["demo", "--context", "1024", "--facts", "2", "--max-new-tokens", "12", "--json", str(file)]
    assert cli.main(asked) == 0
    figures = json.loads(file.read_text())
    assert figures["identical"]
    assert figures["recall_correct"] == 2
    assert figures["mean_acceptance_length"] > 1
    assert figures["device_kv_bytes"] < figures["full_kv_bytes"] / 3
    assert figures["streamed_bytes_per_round"] > figures["full_kv_bytes"] / 2


@pytest.mark.long
def test_the_whole_demo(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert cli.main(["demo", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["recall_correct"] == 4
    assert figures["mean_acceptance_length"] > 1.5
