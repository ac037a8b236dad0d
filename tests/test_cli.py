"""The command line: what it prints where, its exit status, its messages. The engine is a stand-in here."""

import io
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from specstream import cli, cli_generate
from specstream.errors import OutOfBudget
from specstream.text_stream import TextStream
from tests.architectures import build
from tests.echo import GENERATE, Bytes, Echo


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Echo:
    echo = Echo()
    monkeypatch.setattr(cli_generate, "_compile", lambda *_: echo)
    return echo


def run_cli(*arguments: str, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specstream", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_is_quick_and_loads_no_torch() -> None:
    program = (
        "import sys\nfrom specstream.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert done.stdout.endswith("False False\n")
    assert min(times) < 0.5


def test_version() -> None:
    done = run_cli("--version")
    assert (done.returncode, done.stdout) == (0, "specstream 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("nonsense",), "invalid choice: 'nonsense'"),
        (("generate",), "--target"),
        ((*GENERATE, "--prompt", "a", "--jsonl", "b"), "not allowed with argument"),
        ((*GENERATE, "--max-new-tokens", "0"), "'0' is not a positive whole number"),
        (("demo", "--context", "many"), "'many' is not a positive whole number"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt-file", "missing.txt"), "missing.txt: No such file or directory"),
        (("--jsonl", "missing.jsonl"), "missing.jsonl: No such file or directory"),
        (("--prompt", "a", "--draft", "./missing"), "./missing: no such folder"),
        (("--prompt", "a", "--num-speculative-tokens", "0"), "--num-speculative-tokens: got 0; allowed"),
        (("--prompt", "a", "--num-speculative-tokens", "x"), "--num-speculative-tokens: got 'x'"),
        (("--prompt", "a", "--gpu-kv-budget", "4 parsecs"), "--gpu-kv-budget: got '4 parsecs'"),
        (
            ("--prompt", "a", "--draft-sink", "8"),
            "--draft-sink: got 8; allowed: 4, the default, without --draft-window",
        ),
        (("--prompt", "a", "--greedy", "--top-k", "3"), "--top-k: got 3; allowed: None without --do-sample. Pass --do"),
        (("--prompt", "a" * 101), "prompt: got 101"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    engine: Echo, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*GENERATE, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("specstream: error: ")
    assert message in captured.err


@pytest.mark.parametrize("error", [OutOfBudget("needs 4 GiB\nhas 2 GiB"), RuntimeError("odd"), KeyError()])
def test_errors_are_one_line_and_status_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli_generate, "_compile", fail)
    assert cli.main([*GENERATE, "--prompt", "a"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert ("--debug" in captured.err) == (not isinstance(error, OutOfBudget))
    with pytest.raises(type(error)):
        cli.main([*GENERATE, "--prompt", "a", "--debug"])


def test_options_reach_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(target: str, draft: str | None, dtype: str | None, device: str | None, options: dict[str, Any]) -> Echo:
        seen.update(options, target=target, draft=draft, dtype=dtype, device=device)
        return Echo()

    monkeypatch.setattr(cli_generate, "_compile", spy)
    flags = ["--num-speculative-tokens", "7", "--gpu-kv-budget", "64MiB", "--draft-window", "none", "--device", "cpu"]
    assert cli.main([*GENERATE, "--draft", "small/one", "--prompt", "a", *flags]) == 0
    assert seen == {
        "target": "some/model",
        "draft": "small/one",
        "dtype": None,
        "device": "cpu",
        "num_speculative_tokens": 7,
        "gpu_kv_budget": "64MiB",
        "draft_window": None,
    }


def test_text_comes_as_it_is_made(engine: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GENERATE, "--prompt", "häuser 日本 🦊"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "HÄUSER 日本 🦊\n"
    assert captured.err == (
        "8 tokens, 4.0 tokens/s, mean acceptance length 2.50, 2.00 KiB of KV streamed in 3 rounds\n"
    )
    assert engine.closed


class Unfinished(io.StringIO):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        self.parts.append(text)
        return super().write(text)


def test_each_round_is_shown_at_once(engine: Any) -> None:
    out = Unfinished()
    requests = [cli_generate.Request("abcdef", 100)]
    started = cli_generate.start(engine, requests, GenerationConfig(eos_token_id=[256]), None, False)
    cli_generate.stream_text(engine, started, out)
    assert [part for part in out.parts if part] == ["AB", "CD", "EF", "\n"]


def test_prompts_from_a_file_and_from_stdin(
    engine: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("two\nlines\n")
    assert cli.main([*GENERATE, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out == "TWO\nLINES\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert cli.main([*GENERATE]) == 0
    assert capsys.readouterr().out == "FROM STDIN\n"


def test_chat_uses_the_template_or_says_there_is_none(engine: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GENERATE, "--prompt", "hi", "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err
    assert engine.tokenizer is not None
    engine.tokenizer.chat_template = "any"
    assert cli.main([*GENERATE, "--prompt", "hi", "--chat"]) == 0
    assert capsys.readouterr().out == "<USER>HI<ANSWER>\n"


def test_target_without_a_tokenizer(engine: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    engine.tokenizer = None
    assert cli.main([*GENERATE, "--prompt", "hi"]) == 1
    assert "some/model has no tokenizer" in capsys.readouterr().err
    assert engine.closed


def test_json(engine: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GENERATE, "--prompt", "abc", "--json", "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    assert answer["text"] == "AB"
    assert answer["token_ids"] == list(b"AB")
    assert answer["finish_reason"] == "length"
    assert answer["metrics"]["mean_acceptance_length"] == 2.5
    assert answer["engine_metrics"]["tokens_per_second"] == 4


def test_jsonl_keeps_the_order(engine: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a much longer one"}, {"prompt": "short"}, {"prompt": "capped", "max_new_tokens": 3}]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert cli.main([*GENERATE, "--jsonl", str(file)]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["text"] for answer in answers] == ["A MUCH LONGER ONE", "SHORT", "CAP"]
    assert [answer["finish_reason"] for answer in answers] == ["stop", "stop", "length"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "not JSON: Expecting value at column 12"),
        ('["prompt"]', 'an object with "prompt"'),
        ('{"prompt": 5}', 'an object with "prompt"'),
        ('{"prompt": ""}', 'an object with "prompt"'),
        ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'"),
        ('{"prompt": "a", "max_new_tokens": true}', '"max_new_tokens" is True'),
        (json.dumps({"prompt": "a" * 101}), "got 101"),
    ],
)
def test_a_bad_line_is_named(
    engine: Echo, line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n{{"prompt": "good"}}\n')
    assert cli.main([*GENERATE, "--jsonl", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"specstream: error: {file}:2: ")
    assert message in captured.err


def test_ctrl_c_is_one_line_and_status_130(
    engine: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Echo) -> list[SimpleNamespace]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Echo, "step", interrupted)
    assert cli.main([*GENERATE, "--prompt", "abc"]) == 130
    assert capsys.readouterr().err == "\nspecstream: interrupted\n"
    assert engine.closed


@given(st.text(), st.integers(1, 5))
def test_parts_of_a_text_stream_join_to_the_text(text: str, width: int) -> None:
    token_ids = list(text.encode())
    stream = TextStream(Bytes())
    parts = [stream.push(token_ids[i : i + width]) for i in range(0, len(token_ids), width)]
    assert "".join(parts) + stream.finish() == text


@given(st.binary())
def test_tokens_that_are_no_text_are_shown_as_the_tokenizer_does(data: bytes) -> None:
    stream = TextStream(Bytes())
    shown = "".join([stream.push([token]) for token in data]) + stream.finish()
    assert shown == data.decode(errors="replace")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models and a tokenizer, as `save_pretrained` leaves them: folders target and draft."""
    folder = tmp_path_factory.mktemp("pair")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, layers in (("target", 2), ("draft", 1)):
        changes: dict[str, Any] = {"vocab_size": len(alphabet), "num_hidden_layers": layers, "eos_token_id": None}
        model: Any = build("llama", torch.float32, **changes)
        model.save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)
    return folder


def test_generate_with_real_models(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--max-model-len", "256"]
    asked = ["generate", *names, "--prompt", "Once upon a time", "--max-new-tokens", "24"]
    asked += ["--dtype", "float64"]
    assert cli.main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert cli.main(asked) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"

    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    alone = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert answer["token_ids"] == alone.tolist()
    assert answer["text"] == tokenizer.decode(alone)
    assert answer["finish_reason"] == "length"
    assert answer["metrics"]["num_draft_tokens"] > 0
    assert answer["engine_metrics"]["generated_tokens"] == 24


def test_ctrl_c_ends_a_running_command(pair: Path) -> None:
    command = [sys.executable, "-m", "specstream", "generate", "--target", str(pair / "target"), "--prompt", "a"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "8000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored if the tests run in the background
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is generating now
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith(b"\nspecstream: interrupted\n")
    assert b"Traceback" not in err


def test_a_reader_that_leaves_is_no_error() -> None:
    program = (
        "import itertools, sys\nfrom specstream import cli, cli_generate\n"
        "def write(_):\n    for n in itertools.count():\n        print(n)\n"
        "cli_generate.run = write\n"
        f"sys.exit(cli.main({[*GENERATE, '--prompt', 'a']}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"0"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_flags_for_choosing_tokens_go_over_the_models_settings(engine: Echo) -> None:
    engine.generation_config = GenerationConfig(eos_token_id=256, do_sample=True, temperature=0.6, top_p=0.9)
    prompt = ("--prompt", "a")
    assert cli.main([*GENERATE, *prompt, "--seed", "7"]) == 0
    assert cli.main([*GENERATE, *prompt, "--greedy"]) == 0
    engine.generation_config = GenerationConfig(eos_token_id=256)
    assert cli.main([*GENERATE, *prompt, "--temperature", "0.5", "--top-k", "3"]) == 0
    assert cli.main([*GENERATE, *prompt, "--repetition-penalty", "1.2"]) == 0
    names = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
    asked = [(*(getattr(settings, name) for name in names), seed) for settings, seed in engine.settings]
    assert asked == [
        (True, 0.6, 50, 0.9, None, 7),
        (False, 0.6, 50, 0.9, None, None),
        (True, 0.5, 3, None, None, None),
        (None, None, 50, None, 1.2, None),
    ]


def test_settings_of_the_model_that_are_not_supported_are_refused(
    engine: Echo, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generation_config = GenerationConfig(eos_token_id=256, num_beams=3)
    assert cli.main([*GENERATE, "--prompt", "a"]) == 2
    assert "generation_config.num_beams: got 3; allowed: None: it is not supported." in capsys.readouterr().err
