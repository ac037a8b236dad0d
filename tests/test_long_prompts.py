"""A long prompt among requests that decode: it is computed in parts, and nobody waits for it to be through."""

from __future__ import annotations

from typing import Any

import pytest

from specstream.outputs import StepOutput
from tests.helpers import make_engine, model, prompt, reference

PARTS = 10


@pytest.mark.parametrize(("drafting", "every"), [("sequential", 1), ("cohorts", 2), ("off", 1)])
@pytest.mark.parametrize("budget", ["auto", "160KiB"])
def test_requests_go_on_while_a_long_prompt_is_computed(drafting: str, every: int, budget: str) -> None:
    """Each gives tokens in every round in which it verifies: in cohorts, in every second one."""
    target, tokens = model("qwen3"), 120
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 3, "chunk_tokens": 16}
    options |= {"max_model_len": 512, "drafting": drafting, "gpu_kv_budget": budget}
    with make_engine(target, target, **options) as engine:
        assert engine.memory.streams is (budget != "auto")
        running = [engine.submit(prompt(20, seed), max_new_tokens=tokens) for seed in range(2)]
        given: dict[int, list[int]] = {request: [] for request in running}

        def step() -> list[StepOutput]:
            outputs = engine.step()
            for output in outputs:
                given.setdefault(output.request_id, []).extend(output.new_token_ids)
            return outputs

        while not all(given[request] for request in running):
            step()
        late = engine.submit(prompt(32 * PARTS, 2), max_new_tokens=3)
        quiet, rounds = dict.fromkeys(running, 0), 0
        while late not in given:
            served = {output.request_id for output in step()}
            rounds += 1
            quiet = {request: 0 if request in served else quiet[request] + 1 for request in running}
            assert max(quiet.values()) < every
        assert PARTS <= rounds <= PARTS + 2
        while engine.has_unfinished:
            step()
    for seed, request in enumerate(running):
        assert given[request] == reference(target, prompt(20, seed), tokens).tokens
    assert given[late] == reference(target, prompt(32 * PARTS, 2), 3).tokens
