"""A cut model without arithmetic, for tests of plans."""

from __future__ import annotations

import torch
from torch import fx, nn

from specstream.graph import AttentionSite, AttentionSpec, ModelSpec, PartitionedModel, Piece
from specstream.pipeline import PassRunner
from specstream.planner import round_passes
from specstream.profiles import CPU_PROFILE
from specstream.round_plan import Plan
from specstream.round_spec import RoundSpec, SeatSpec
from specstream.round_work import NO_DRAFT


def toy_model(layers: int) -> PartitionedModel:
    """Pieces that name the values a transformer's would have, and give None for each; 20 bytes of KV a token."""

    def piece(inputs: tuple[str, ...], outputs: tuple[str, ...], frees: tuple[str, ...] = ()) -> Piece:
        graph = fx.Graph()
        for name in inputs:
            graph.placeholder(name)
        graph.output((None,) * len(outputs))
        return Piece(fx.GraphModule(nn.Module(), graph), inputs, outputs, frees)

    attentions = tuple(AttentionSpec(i, f"layers.{i}.attn", 4, 1, 5, 1.0) for i in range(layers))
    pieces = [piece(("input_ids", "position_ids"), ("q0", "k0", "v0", "h0"))]
    for i in range(1, layers):
        pieces.append(piece((f"o{i - 1}", f"h{i - 1}"), (f"q{i}", f"k{i}", f"v{i}", f"h{i}"), (f"o{i - 1}",)))
    pieces.append(piece((f"o{layers - 1}", f"h{layers - 1}", "logit_rows"), ("logits",)))
    sites = tuple(AttentionSite(a, f"q{a.layer}", f"k{a.layer}", f"v{a.layer}", f"o{a.layer}") for a in attentions)
    spec = ModelSpec("toy", 32, torch.float16, torch.device("cpu"), None, attentions)
    return PartitionedModel(tuple(pieces), sites, ("input_ids", "position_ids", "logit_rows"), "logits", spec)


def seat(seat: int = 0, *, resident: int = 0, streamed: int = 4, offload: int = 0, tail: int = 3) -> SeatSpec:
    """A request in a verification round: its open chunk comes right after what is offloaded."""
    return SeatSpec(seat, resident, tail, streamed, offload, resident + streamed + offload, 1)


def round_spec(
    *seats: SeatSpec, layers: int = 2, slots: int = 2, group: int = 2, warm: bool = True, drafts: int = 2
) -> RoundSpec:
    spec = RoundSpec(layers, slots, group, 100, seats, 0, drafts)  # five tokens a chunk
    return spec.warm() if warm else spec


def make_plan(spec: RoundSpec) -> Plan:
    plan: Plan = PassRunner("toy").run(round_passes(spec, CPU_PROFILE, NO_DRAFT), toy_model(spec.num_layers))
    return plan
