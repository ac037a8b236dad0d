"""What the device is told of a round comes there while the link brings histories."""

from __future__ import annotations

from typing import Any

import torch

from specstream.device_copy import Transfer
from specstream.mirror import Mirror
from specstream.streams import new_stream, record

COPIES, COPY_BYTES = 16, 256 << 20
"""At 55 GB/s, 78 ms."""


def test_tables_do_not_wait_for_the_link() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mirror = Mirror({"numbers": (torch.int64, (5_000,))}, device)
    mirror.upload()  # compiles the kernel
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    destination = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    link, draft = (new_stream(device, high_priority=high) for high in (True, False))
    torch.cuda.synchronize()
    for _ in range(COPIES):
        Transfer(destination.data_ptr(), source.data_ptr(), COPY_BYTES, True).launch(link.cuda_stream)
    copied: Any = record(link)
    mirror.host["numbers"][:] = range(5_000)
    with torch.cuda.stream(draft):
        mirror.upload()
        uploaded = record(draft)
    uploaded.synchronize()
    assert not copied.query(), "the link was busy all the time"
    assert mirror.device["numbers"].tolist() == list(range(5_000))
