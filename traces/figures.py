"""The figures of a run, of a round and of its layers: what is shown of them, anywhere, is computed here.

Names and definitions are those of `engine.metrics()` where it has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from specstream.traces.records import PlannedRound, RecordedRound, RoundSummary, RunInfo
from specstream.traces.waits import (
    TARGET,
    Interval,
    Wait,
    clipped,
    exposed_draft,
    lane_of,
    measured_drafting,
    measured_waits,
    planned_waits,
    tasks_of,
)


@dataclass(frozen=True)
class RunFigures:
    """Of the rounds of a run that are kept. A decode round is one in which no prompt is computed."""

    num_rounds: int
    num_decode_rounds: int
    num_verify_rounds: int
    """Verifications, of each request in each round."""
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_per_position: tuple[float, ...]
    """For each candidate position, the share of verifications that accepted it."""
    generated_tokens: int
    decode_tokens: int
    decode_seconds: float
    tokens_per_second: float
    streamed_bytes: int
    streamed_bytes_per_round: float
    """Of decode rounds, on average."""
    link_bytes: int
    """Fetched, what was fetched ahead and dropped included."""
    median_round_us: float | None
    """Of decode rounds; None if there are none."""
    slowest_round_us: float | None
    link_floor_us: float | None
    """What a decode round's streamed bytes take on the link alone, on average."""
    over_link_floor: float | None
    """How many times as long decode rounds take."""
    link_utilization: float | None
    """Of decode rounds: streamed bytes / (time x the link's bandwidth)."""
    typical_round: int | None
    """The decode round of median time, or the last round if there are none."""


def run_figures(info: RunInfo, summaries: Sequence[RoundSummary]) -> RunFigures:
    """The figures of a run; those of the link are None if its bandwidth is not known or nothing was streamed."""
    decode = [each for each in summaries if not each.prompt_tokens]
    verifications = sum(each.verifications for each in summaries)
    drafted, accepted = sum(each.candidates for each in summaries), sum(each.accepted for each in summaries)
    lengths = [length for each in summaries for length in each.accepted_of]
    positions = range(max((each.most_candidates for each in summaries), default=0))
    per_position = tuple(sum(length > position for length in lengths) for position in positions)
    decode_us = sum(each.duration_us for each in decode)
    decode_tokens, streamed = sum(each.produced for each in decode), sum(each.streamed_bytes for each in decode)
    middle = median_low((each.duration_us, each.index) for each in decode) if decode else None
    link_us = link_floor_us(streamed, info)
    return RunFigures(
        num_rounds=len(summaries),
        num_decode_rounds=len(decode),
        num_verify_rounds=verifications,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        accepted_per_position=per_position,
        mean_acceptance_length=1 + accepted / verifications if verifications else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        acceptance_per_position=tuple(count / max(1, verifications) for count in per_position),
        generated_tokens=sum(each.produced for each in summaries),
        decode_tokens=decode_tokens,
        decode_seconds=decode_us / 1e6,
        tokens_per_second=decode_tokens / decode_us * 1e6 if decode_us else 0.0,
        streamed_bytes=sum(each.streamed_bytes for each in summaries),
        streamed_bytes_per_round=streamed / max(1, len(decode)),
        link_bytes=sum(each.fetched_bytes for each in summaries),
        median_round_us=middle[0] if middle else None,
        slowest_round_us=max((each.duration_us for each in decode), default=None),
        link_floor_us=link_us / len(decode) if link_us else None,
        over_link_floor=decode_us / link_us if link_us else None,
        link_utilization=link_us / decode_us if link_us and decode_us else None,
        typical_round=middle[1] if middle else summaries[-1].index if summaries else None,
    )


@dataclass(frozen=True)
class RoundFigures:
    """Of a round, planned or measured. What needs its tasks' times is None where only the whole round was measured."""

    duration_us: float
    """Planned: from one round to the next."""
    link_floor_us: float | None
    """What its streamed bytes take on the link alone."""
    over_link_floor: float | None
    link_utilization: float | None
    streamed_bytes: int
    busy_us: dict[str, float] | None
    """By lane; measured: from the round's start to its end."""
    bubbles_us: float | None
    """How long the target's lane stands still."""
    draft_us: float | None
    exposed_draft_us: float | None
    """Planned: by how much the round would be shorter without. Measured: while the target waited for the draft."""
    hidden_draft_us: float | None
    """The rest of the draft's time."""
    bubble_fill: float | None
    """Hidden draft time / the bubbles' time; None without bubbles."""


def planned_figures(plan: PlannedRound, info: RunInfo) -> RoundFigures:
    """What is predicted of a round of this plan."""
    bubbles = sum(bubble.duration_us for bubble in plan.bubbles)
    floor = plan.link_floor_us or None
    return RoundFigures(
        duration_us=plan.period_us,
        link_floor_us=floor,
        over_link_floor=plan.period_us / floor if floor else None,
        link_utilization=floor / plan.period_us if floor and plan.period_us else None,
        streamed_bytes=plan.streamed_bytes,
        busy_us={lane: plan.busy_us.get(lane, 0.0) for lane in info.lanes},
        bubbles_us=bubbles,
        draft_us=plan.hidden_draft_us + plan.exposed_draft_us,
        exposed_draft_us=plan.exposed_draft_us,
        hidden_draft_us=plan.hidden_draft_us,
        bubble_fill=plan.hidden_draft_us / bubbles if bubbles else None,
    )


def measured_figures(recorded: RecordedRound, plan: PlannedRound, info: RunInfo) -> RoundFigures:
    """What was measured of a round; `plan` is its plan."""
    duration, floor = recorded.duration_us, link_floor_us(recorded.streamed_bytes, info)
    busy = bubbles = draft = exposed = hidden = None
    if recorded.spans:
        tasks, busy = tasks_of(plan), dict.fromkeys(info.lanes, 0.0)
        for span in recorded.spans:
            lane = lane_of(span, tasks)
            busy[lane] = busy.get(lane, 0.0) + _total(clipped((span.start_us, span.stop_us), duration))
        waits, drafting = measured_waits(recorded, plan), measured_drafting(recorded, plan)
        bubbles, draft = sum(wait.duration_us for wait in waits), _total(drafting)
        exposed = _total(exposed_draft(drafting, waits))
        hidden = draft - exposed
    return RoundFigures(
        duration_us=duration,
        link_floor_us=floor,
        over_link_floor=duration / floor if floor else None,
        link_utilization=floor / duration if floor and duration else None,
        streamed_bytes=recorded.streamed_bytes,
        busy_us=busy,
        bubbles_us=bubbles,
        draft_us=draft,
        exposed_draft_us=exposed,
        hidden_draft_us=hidden,
        bubble_fill=hidden / bubbles if bubbles and hidden is not None else None,
    )


def round_scalars(recorded: RecordedRound, plan: PlannedRound, info: RunInfo) -> dict[str, float]:
    """The figures of a round that are drawn over all rounds, by name. What it has no figure for is left out."""
    alone, measured = run_figures(info, [RoundSummary.of(recorded)]), measured_figures(recorded, plan, info)
    values = {
        "duration_ms": measured.duration_us / 1e3,
        "tokens_per_second": alone.tokens_per_second if alone.num_decode_rounds else None,
        "mean_acceptance_length": alone.mean_acceptance_length if alone.num_verify_rounds else None,
        "link_utilization": measured.link_utilization,
        "bubble_fill": measured.bubble_fill,
        "streamed_bytes": float(measured.streamed_bytes),
    }
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class LayerFigures:
    """Of one layer in a round; -1 is what belongs to none. A fetch counts in the round in which it starts."""

    layer: int
    target_us: float
    link_us: float
    link_bytes: int
    bytes_per_us: float | None
    """Of its fetches while they run; None without any."""
    waited_us: float
    """How long the target's lane stood still before tasks of this layer."""


def planned_layers(plan: PlannedRound) -> list[LayerFigures]:
    """What is predicted of each layer, in order."""
    return _layers(plan, [(t.name, t.stop_us - t.start_us) for t in plan.tasks], planned_waits(plan))


def measured_layers(recorded: RecordedRound, plan: PlannedRound) -> list[LayerFigures]:
    """What was measured of each layer, in order; nothing if only the whole round was measured."""
    times = [(s.task, s.stop_us - s.start_us) for s in recorded.spans if s.start_us >= 0]
    return _layers(plan, times, measured_waits(recorded, plan)) if times else []


def _layers(plan: PlannedRound, times: Iterable[tuple[str, float]], waits: Iterable[Wait]) -> list[LayerFigures]:
    tasks = tasks_of(plan)
    layers = sorted({task.layer for task in plan.tasks})
    target, link, waited = (dict.fromkeys(layers, 0.0) for _ in range(3))
    moved = dict.fromkeys(layers, 0)
    for name, duration in times:
        task = tasks[name]
        if task.lane == TARGET:
            target[task.layer] += duration
        elif task.kind == "fetch":
            link[task.layer] += duration
            moved[task.layer] += task.bytes
    for wait in waits:
        if wait.task:
            waited[tasks[wait.task].layer] += wait.duration_us
    return [
        LayerFigures(n, target[n], link[n], moved[n], moved[n] / link[n] if link[n] else None, waited[n])
        for n in layers
    ]


def link_floor_us(streamed_bytes: int, info: RunInfo) -> float | None:
    """What these bytes take on the link alone; None if its bandwidth is not known or there are none."""
    return streamed_bytes / info.link_bytes_per_us if streamed_bytes and info.link_bytes_per_us else None


def _total(times: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in times)
