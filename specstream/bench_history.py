"""A request in the middle of its life, without a prefill: committed history of random KV, for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig

from specstream.engine import Engine
from specstream.errors import OutOfBudget
from specstream.kv import DeviceStore, SequenceKV
from specstream.sequence import Sequence

HISTORY_STD = 0.1
"""Of the keys and values: small, so that no token of the history outshines the others."""


def place_history(
    engine: Engine,
    tokens: int,
    *,
    max_new_tokens: int,
    seed: int = 0,
    generation_config: GenerationConfig | None = None,
) -> Sequence:
    """Seats a request as it stands after the prefill of a prompt of `tokens` random tokens.

    The KV of the prompt is there, random, and the first of its new tokens; the next round verifies. What is full and
    not resident is in host memory; the rest is on the device, and so is, beyond the prompt, what the device blocks of
    the request happen to hold: random too.

    Raises:
        OutOfBudget: there is no seat or no memory for it now.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(engine.vocab_size, (tokens + 1,), generator=generator).tolist()
    sequence = engine.make_request(
        ids[:tokens],
        engine._undelivered,
        max_new_tokens=max_new_tokens,
        seed=seed,
        generation_config=generation_config,
    )
    engine.enqueue(sequence)
    if sequence not in engine._scheduler.admit():
        engine.cancel(sequence.request_id)
        raise OutOfBudget(f"no seat or no KV memory is free for another request of {sequence.limit} tokens")
    counters = engine._counters
    counters.longest_request = max(counters.longest_request, sequence.limit)
    kv = sequence.kv
    assert kv is not None
    sequence.tokens.append(ids[tokens])
    kv.length = tokens
    kv.streamed = kv.offload_after(tokens)
    fill_history(engine._executor.store, kv, seed)
    return sequence


def fill_history(store: DeviceStore, kv: SequenceKV, seed: int) -> None:
    """Makes the KV of a request random: its host chunks, and its device blocks as a whole.

    Values are drawn on the device, a layer at a time. When this returns they are in place.
    """
    generator = torch.Generator(store.device).manual_seed(seed)

    def random(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=store.device)
        return drawn.mul_(HISTORY_STD)

    for layer in range(kv.layout.num_layers):
        blocks = store.blocks[layer]
        blocks[kv.blocks] = random(blocks[kv.blocks])
        if kv.streamed:
            on_host = kv.host_view(layer, kv.resident, kv.resident + kv.streamed)
            on_host.copy_(random(on_host))
    if store.device.type == "cuda":
        torch.cuda.synchronize(store.device)
