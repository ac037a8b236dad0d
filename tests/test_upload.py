"""Tables from the host, read by a kernel, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specstream.kernels.upload import TILE, upload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("words", [1, 2, 33, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_all_words_and_no_others_are_written(words: int) -> None:
    here = torch.randint(-(2**62), 2**62, (words,), pin_memory=DEVICE.type == "cuda")
    there = torch.full((words + 2,), 7, device=DEVICE)
    upload(here, there[1:-1])
    assert there[[0, -1]].tolist() == [7, 7]
    assert torch.equal(there[1:-1].cpu(), here)
