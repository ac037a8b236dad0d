"""An engine that answers with its prompt, for tests of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from transformers import GenerationConfig

from specstream.errors import InvalidOption

GENERATE = ("generate", "--target", "some/model")


class Bytes:
    """A tokenizer whose tokens are bytes, so that most characters span several; 256 ends a text."""

    chat_template: str | None = None

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, token_ids: list[int], **_: object) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return list(f"<{messages[0]['role']}>{messages[0]['content']}<answer>".encode())


@dataclass
class FakeMetrics:
    generated_tokens: int = 8
    num_draft_tokens: int = 12
    num_rounds: int = 3
    mean_acceptance_length: float = 2.5
    streamed_bytes: int = 2048

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / 2


class Echo:
    """An engine that answers a prompt with itself in capitals, `width` tokens a round."""

    width = 2

    def __init__(self) -> None:
        self.tokenizer: Bytes | None = Bytes()
        self.closed = False
        self.settings: list[tuple[GenerationConfig, int | None]] = []
        self._left: dict[int, list[int]] = {}
        self._answers: dict[int, list[int]] = {}
        self._reasons: dict[int, str] = {}

    generation_config = GenerationConfig(eos_token_id=256)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._left)

    def submit(
        self, prompt_ids: list[int], *, max_new_tokens: int, generation_config: GenerationConfig, seed: int | None
    ) -> int:
        assert generation_config.eos_token_id == [256]
        self.settings.append((generation_config, seed))
        if len(prompt_ids) > 100:
            raise InvalidOption("prompt", len(prompt_ids), "at most 100 tokens")
        answer = [*bytes(prompt_ids).decode().upper().encode(), 256]
        request = len(self._reasons)
        self._reasons[request] = "stop" if len(answer) <= max_new_tokens else "length"
        self._left[request] = answer[:max_new_tokens]
        self._answers[request] = self._left[request]
        return request

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for request, left in list(self._left.items()):
            new, self._left[request] = left[: self.width], left[self.width :]
            output = None
            if not self._left[request]:
                del self._left[request]
                output = SimpleNamespace(
                    token_ids=self._answers[request],
                    finish_reason=self._reasons[request],
                    metrics=FakeMetrics(),
                )
            outputs.append(SimpleNamespace(request_id=request, new_token_ids=new, output=output))
        return outputs

    def metrics(self) -> FakeMetrics:
        return FakeMetrics()

    def close(self) -> None:
        self.closed = True
