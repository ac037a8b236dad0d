"""How long no round is computed: from a round's logits on, through acceptance and draft steps, until the next one."""

from __future__ import annotations

from specstream.cost import DeviceProfile
from specstream.options import Options
from specstream.round_graph import Task, TaskKind
from specstream.round_work import DraftWork

HOST_GAP_US = 500
"""Acceptance, and the host's work until it has launched the next round: 200 to 900 us were measured beside an H200."""


def idle_bytes(options: Options, profile: DeviceProfile, draft: DraftWork) -> int:
    """What the link can bring meanwhile, if there is room for it."""
    read = draft.bytes_of(options.max_num_seqs)
    step = Task("draft", TaskKind.DRAFT, memory_bytes=read, launches=draft.launches)
    after_acceptance = draft.layers and options.drafting in ("auto", "sequential")
    steps = options.most_candidates if after_acceptance else 0
    return int((HOST_GAP_US + steps * profile.cost_us(step)) * profile.host_to_device_bytes_per_us)
