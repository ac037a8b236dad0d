"""The streams of an engine on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specstream.round_plan import Lane
from specstream.streams import new_stream


@dataclass(frozen=True)
class LaneStreams:
    """One for each lane, and those on which graphs are captured meanwhile.

    An engine that takes another's place goes on with its streams: for each that multiplies matrices, torch keeps work
    memory until the process ends, 32 MiB on an H200.
    """

    lanes: dict[Lane, torch.cuda.Stream]
    capturing: dict[Lane, torch.cuda.Stream]
    """For rounds, while those of the lanes are busy."""
    draft_steps: torch.cuda.Stream
    """For draft steps: kernels of a graph have the priority of the stream that it is captured on."""

    @classmethod
    def on(cls, device: torch.device) -> LaneStreams | None:
        """New ones; None where the device is the host."""
        if device.type != "cuda":
            return None
        return cls(
            {lane: new_stream(device, high_priority=lane is not Lane.DRAFT) for lane in Lane},
            {lane: new_stream(device, high_priority=True) for lane in (Lane.TARGET, Lane.LINK)},
            new_stream(device, high_priority=False),
        )
