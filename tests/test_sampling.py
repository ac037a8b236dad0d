"""Sampling: noise, the distribution that comes out, and settings that are transformers' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, WatermarkingConfig

from specstream.errors import InvalidOption
from specstream.processors import make_sampling
from specstream.sampling import Noise, Purpose, Sampling
from specstream.settings import HONOURED, merge_settings
from specstream.speculate import Candidates, Speculation
from tests.helpers import make_engine, model, prompt

VOCAB = 6
CHI_SQUARE = {4: 23.5, 5: 25.7, 2: 18.4, 1: 15.1, 3: 21.1}
"""Values that a right sampler exceeds once in 10,000 times, by degrees of freedom."""


def test_noise_depends_on_seed_position_and_purpose_alone() -> None:
    first = Noise(3).uniform(5, Purpose.ACCEPT, 4)
    assert torch.equal(first, Noise(3).uniform(5, Purpose.ACCEPT, 4))
    others = [Noise(4).uniform(5, Purpose.ACCEPT, 4), Noise(3).uniform(6, Purpose.ACCEPT, 4)]
    others += [Noise(3).uniform(5, purpose, 4) for purpose in Purpose if purpose is not Purpose.ACCEPT]
    assert all(not torch.isin(first, other).any() for other in others)
    assert ((first >= 0) & (first < 1)).all()


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 2**64, -1])
def test_any_int_is_a_seed(seed: int) -> None:
    assert 0 <= Noise(seed).uniform(0, Purpose.TOKEN) < 1


def test_drawing_follows_the_probabilities_and_never_gives_the_impossible() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0], dtype=torch.float64)
    drawn = torch.tensor([Noise(0).draw(probabilities * 7, position, Purpose.TOKEN) for position in range(4000)])
    check_distribution(drawn.bincount(minlength=VOCAB), probabilities)


def check_distribution(counts: Tensor, expected: Tensor) -> None:
    """Chi-square of counts against probabilities; what has none must not occur."""
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * counts.sum()
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    degrees = int(possible.sum()) - 1
    assert degrees == 0 or statistic < CHI_SQUARE[degrees], (statistic, counts, wanted)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.9, "temperature": 1.3},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.7, "temperature": 1.5},
}
METHODS = [("standard", "probabilistic"), ("standard", "greedy"), ("coupled", "probabilistic")]


def check_method(
    rejection: Any, drafting: Any, settings: dict[str, Any], draws: int, *, broken: dict[int, float] | None = None
) -> None:
    """Blocks of two candidates from a draft that is often wrong, verified: the first token, and the second after it.

    Args:
        broken: by token, what the draft has for all scores after it.
    """
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5  # logits after each token
    draft = target + torch.randn(VOCAB, VOCAB, generator=generator)
    for token, value in (broken or {}).items():
        draft[token] = value
    text = [2, 0, 4]
    config = merge_settings(None, do_sample=True, **settings)
    rule = Speculation(rejection, drafting)
    first, second = torch.zeros(VOCAB), torch.zeros(VOCAB, VOCAB)
    accepted = 0
    sampling = make_sampling(config, 2, 0)
    for seed in range(draws):
        own = Sampling(True, seed, sampling.processors)
        candidates = Candidates()
        for _ in range(2):
            last = (text + candidates.tokens)[-1]
            proposed = rule.propose(own, draft[last], text, candidates)
            assert proposed == (last not in (broken or {}))
            if not proposed:
                break
        logits = target[[text[-1], *candidates.tokens]]
        scores = own.scores(logits, text, candidates.tokens)
        count, produced = rule.accept(own, scores, len(text), candidates)
        accepted += count
        first[produced[0]] += 1
        if len(produced) > 1:
            second[produced[0], produced[1]] += 1
    assert 0.1 < accepted / (2 * draws) < 0.98
    expected = torch.softmax(sampling.scores(target[text[-1]][None], text, [])[0].double(), 0)
    check_distribution(first, expected)
    if rejection == "standard":  # coupled: which blocks go on depends on the noise that the second token shares
        for token in range(VOCAB):
            if second[token].sum() >= 200:
                after = sampling.scores(target[token][None], [*text, token], [])[0]
                check_distribution(second[token], torch.softmax(after.double(), 0))


@pytest.mark.parametrize(("rejection", "drafting"), METHODS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_the_targets(rejection: str, drafting: str, settings: str) -> None:
    check_method(rejection, drafting, SETTINGS[settings], 2_000)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("rejection", "drafting"), METHODS)
@pytest.mark.parametrize("settings", ["plain", "top_k"])
@pytest.mark.parametrize("broken", [{1: -INF, 3: INF}, {0: NAN, 5: -INF}], ids=str)
def test_a_draft_without_a_distribution_proposes_nothing(
    rejection: str, drafting: str, settings: str, broken: dict[int, float]
) -> None:
    """After some tokens; the blocks that end there have the target's distribution as all have."""
    check_method(rejection, drafting, SETTINGS[settings], 2_000, broken=broken)


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_the_targets_over_100_000_draws(settings: str) -> None:
    check_method("standard", "probabilistic", SETTINGS[settings], 100_000)


def test_a_draft_of_another_temperature_is_noticed() -> None:
    """The negative twin: probabilities that are not what the candidate was drawn from give another distribution."""
    rule, counts = Speculation("standard", "probabilistic"), torch.zeros(VOCAB)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 0.2]]).repeat(2, 1)
    for seed in range(2_000):
        own, candidates = Sampling(True, seed), Candidates()
        rule.propose(own, logits[0] * 0.2, [1], candidates)
        candidates.probabilities = [torch.softmax(logits[0].double() * 3, 0)]
        counts[rule.accept(own, logits, 1, candidates)[1][0]] += 1
    with pytest.raises(AssertionError):
        check_distribution(counts, torch.softmax(logits[0].double(), 0))


def check_coupled(cases: int) -> None:
    chooser = random.Random(0)
    for case in range(cases):
        target, draft = model("qwen3"), model("qwen3", seed=chooser.choice([0, 1]))
        lengths = [chooser.randrange(1, 40) for _ in range(chooser.randrange(1, 4))]
        prompts = [list(prompt(length, index)) for index, length in enumerate(lengths)]
        arguments: dict[str, Any] = {
            "do_sample": True,
            "temperature": chooser.choice([0.5, 1.0, 1.6]),
            "top_p": chooser.choice([0.8, 1.0]),
            "seed": [chooser.randrange(2**40) for _ in prompts],
            "max_new_tokens": 10,
            "return_dict_in_generate": True,
        }
        options: dict[str, Any] = {
            "max_model_len": 64,
            "rejection_sample_method": "coupled",
            "chunk_tokens": chooser.choice([3, 8]),
        }
        drafting = chooser.choice(["sequential", "cohorts"])
        budget = chooser.choice(["min", "auto"])
        depth = chooser.randrange(1, 9)
        given = options | {"gpu_kv_budget": budget, "num_speculative_tokens": depth, "drafting": drafting}
        with make_engine(target, draft, **given) as engine:
            together: Any = engine.generate(prompts, **arguments)
        with make_engine(target, None, **options) as engine:
            for row, ids, seed in zip(together.requests, prompts, arguments["seed"], strict=True):
                alone: Any = engine.generate([ids], **arguments | {"seed": seed})
                assert alone.requests[0].token_ids == row.token_ids, case


def test_coupled_samples_are_the_targets_own() -> None:
    check_coupled(40)


@pytest.mark.long
def test_coupled_samples_are_the_targets_own_in_500_cases() -> None:
    check_coupled(500)


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_a_sample_depends_on_its_seed_and_not_on_its_batch(method: str) -> None:
    target, draft = model("qwen3"), model("qwen3", seed=1)
    arguments: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
    with make_engine(target, draft, rejection_sample_method=method, max_model_len=64) as engine:
        ids = [list(prompt(9)), list(prompt(17, 1)), list(prompt(4, 2))]
        batch: Any = engine.generate(ids, seed=[5, 6, 7], return_dict_in_generate=True, **arguments)
        alone: Any = engine.generate([ids[1]], seed=6, return_dict_in_generate=True, **arguments)
        other: Any = engine.generate([ids[1]], seed=8, return_dict_in_generate=True, **arguments)
        assert alone.requests[0].token_ids == batch.requests[1].token_ids != other.requests[0].token_ids
        torch.manual_seed(3)
        first: Any = engine.generate(ids, **arguments)
        torch.manual_seed(3)
        again: Any = engine.generate(ids, **arguments)
        assert torch.equal(first, again)


PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[32], [71, 71], [74]]},
    {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    {"min_length": 19, "eos_token_id": list(range(40))},
    {"suppress_tokens": list(range(0, 96, 2))},
    {"begin_suppress_tokens": list(range(0, 96, 3))},
    {"forced_eos_token_id": 5, "eos_token_id": 5},
    {"sequence_bias": [[[9], 4.0], [[9, 17], -8.0]]},
    {"exponential_decay_length_penalty": (4, 1.9), "eos_token_id": [5, 6]},
    {"do_sample": True, "top_k": 1, "temperature": 0.7, "repetition_penalty": 1.2},
    {"remove_invalid_values": True, "eos_token_id": list(range(20))},
]


@pytest.mark.parametrize("settings", PROCESSORS, ids=lambda settings: "+".join(settings))
@pytest.mark.parametrize("seed", [0, 1])
def test_settings_do_what_they_do_in_transformers(settings: dict[str, Any], seed: int) -> None:
    target: Any = model("qwen3")
    ids = torch.tensor([prompt(13)])
    arguments = {"max_new_tokens": 16, "pad_token_id": 0, **settings}
    reference = target.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, pad_token_id=0)
    if "remove_invalid_values" not in settings and "forced_eos_token_id" not in settings:
        assert not torch.equal(reference, plain), "the setting changes nothing here"
    with make_engine(target, model("qwen3", seed=seed), max_model_len=64, gpu_kv_budget="min") as engine:
        ours: Any = engine.generate(ids, **arguments)
        assert torch.equal(ours, reference)


def test_penalties_of_vllm() -> None:
    """Frequency and presence count what was produced, at every position of a block; a bias counts everywhere."""
    with make_engine(model("qwen3"), model("qwen3"), max_model_len=96, num_speculative_tokens=6) as engine:
        ids = [list(prompt(13))]
        plain: Any = engine.generate(ids, max_new_tokens=40, return_dict_in_generate=True)
        strict: Any = engine.generate(ids, max_new_tokens=40, presence_penalty=1e9, return_dict_in_generate=True)
        often: Any = engine.generate(ids, max_new_tokens=40, frequency_penalty=1e9, return_dict_in_generate=True)
        biased: Any = engine.generate(ids, max_new_tokens=40, logit_bias={17: 1e9}, return_dict_in_generate=True)
    assert len(set(plain.requests[0].token_ids)) < 40
    assert len(set(strict.requests[0].token_ids)) == len(set(often.requests[0].token_ids)) == 40
    assert biased.requests[0].token_ids == [17] * 40


def test_several_sequences_of_a_prompt() -> None:
    with make_engine(model("qwen3"), model("qwen3", seed=1), max_model_len=64) as engine:
        ids = [list(prompt(9)), list(prompt(9, 1))]
        out: Any = engine.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=8, seed=0)
    assert out.shape == (6, 17)
    assert out[:, :9].tolist() == [ids[0]] * 3 + [ids[1]] * 3
    assert len({tuple(row) for row in out[:3, 9:].tolist()}) == 3


UNSUPPORTED_VALUES: dict[str, Any] = {
    "num_beams": 2,
    "guidance_scale": 2.0,
    "penalty_alpha": 0.6,
    "watermarking_config": WatermarkingConfig(),
    "forced_bos_token_id": 3,
    "max_time": 1.0,
    "output_attentions": True,
    "output_hidden_states": True,
    "top_h": 0.5,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "token_healing": True,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 2,
    "assistant_early_exit": 1,
    "is_assistant": True,
    "low_memory": True,
    "dola_layers": "low",
    "constraints": [1],
    "force_words_ids": [[1]],
    "prefill_chunk_size": 8,
    "use_mtp": True,
    "assistant_ensemble_weight": 0.5,
    "continuous_batching_config": {},
    "speculation_type": "x",
}


def test_every_setting_of_transformers_is_honoured_refused_or_without_effect() -> None:
    from specstream.settings import _WITHOUT_EFFECT

    known = set(GenerationConfig().to_dict()) | {"top_h"}
    unknown = known - HONOURED - _WITHOUT_EFFECT - UNSUPPORTED_VALUES.keys()
    assert not unknown, f"settings that nobody has thought of: {sorted(unknown)}"
    for name in sorted(UNSUPPORTED_VALUES.keys() & known):
        config = GenerationConfig()
        setattr(config, name, UNSUPPORTED_VALUES[name])
        with pytest.raises(InvalidOption, match=f"generation_config.{name}: got"):
            merge_settings(config)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": 0.0, "do_sample": True}, "temperature: got 0.0; allowed: a number above 0."),
        ({"top_k": -3, "do_sample": True}, "top_k: got -3; allowed: an integer from 0."),
        ({"temperature": 0.5}, "temperature: got 0.5; allowed: None without do_sample=True. Pass do_sample=True."),
        ({"num_beams": 2}, "num_beams: got 2; allowed: None: it is not supported. Set num_beams to None."),
        ({"tempreature": 0.5}, "tempreature: got 0.5; allowed: an argument of specstream's generate"),
        ({"seed": [1, 2], "do_sample": True}, "seed: got '2 seeds'; allowed: an int, or one for each of the 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_the_engine_goes_on(settings: dict[str, Any], text: str) -> None:
    with make_engine(model("qwen3"), None, max_model_len=64) as engine:
        with pytest.raises(InvalidOption, match=text):
            engine.generate([list(prompt(5))], max_new_tokens=4, **settings)
        assert not engine.has_unfinished
        assert engine.generate([list(prompt(5))], max_new_tokens=4).shape == (1, 9)  # type: ignore[union-attr]
