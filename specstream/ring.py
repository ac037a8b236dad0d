"""How many slots a ring has on a device of its own."""

from __future__ import annotations

from dataclasses import dataclass

OWN_DEVICE_SLOTS = 4
"""The fetches in flight last as long as the host needs between two rounds."""


def own_device_slots(num_layers: int) -> int:
    """The first number from OWN_DEVICE_SLOTS to twice that which divides the layers; if none does, the first.

    Then each round leaves the ring where it found it, so that one captured graph serves all rounds of a structure.
    """
    near = range(OWN_DEVICE_SLOTS, 2 * OWN_DEVICE_SLOTS + 1)
    return next((slots for slots in near if num_layers % slots == 0), OWN_DEVICE_SLOTS)


@dataclass(frozen=True)
class Fill:
    """How full ring slots are."""

    chunk_bytes: int
    """Of a chunk in a layer."""
    group: int
    """Chunks that a slot has room for."""
    streamed: int
    """Chunks of a request that stream."""

    @property
    def slot_bytes(self) -> int:
        return self.group * self.chunk_bytes

    @property
    def group_bytes(self) -> float:
        """Of a group on average: the last one of a request has the rest of its chunks."""
        return self.streamed * self.chunk_bytes / max(1, -(-self.streamed // self.group))


def longer_ring(num_layers: int, slots: int, fill: Fill, idle_bytes: int, most_bytes: int) -> int:
    """Slots of a ring, `slots` or more, which hold what the link brings while no round is computed.

    One more is there for the group that is attended to. More than `slots` divide the layers, and take no more than
    `most_bytes`: what the ring leaves, resident chunks use as well.
    """
    most = min(num_layers, most_bytes // fill.slot_bytes) if fill.streamed else slots
    longer = (number for number in range(slots + 1, most + 1) if num_layers % number == 0)
    for number in longer:
        if (slots - 1) * fill.group_bytes >= idle_bytes:
            break
        slots = number
    return slots
