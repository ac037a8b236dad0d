"""What is kept of a traced run: its plans, as they were predicted, and its rounds, as they were measured.

Times are in microseconds, those of a round from its start. Bytes of a task are those that cross the link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

FORMAT = 1
"""Counted up when files that were written before can no longer be read."""


@dataclass(frozen=True)
class RunInfo:
    """One run of an engine, or a plan that was only predicted."""

    name: str
    started: str
    """ISO 8601, UTC."""
    kind: Literal["engine", "plan"]
    machine: dict[str, Any]
    versions: dict[str, str]
    target: str
    draft: str | None
    options: dict[str, Any]
    memory: dict[str, int]
    """Bytes by class."""
    link_bytes_per_us: float | None
    lanes: tuple[str, ...] = ("target", "link", "store", "draft")
    """In the order in which they are drawn."""
    format: int = FORMAT


@dataclass(frozen=True)
class PlannedTask:
    """A task of a plan, when it is predicted to run in a round that repeats."""

    name: str
    lane: str
    kind: str
    start_us: float
    stop_us: float
    idle_us: float
    """How long its lane stands still before it."""
    why: str
    """What its start waits for last: "lane", "waits for" or "host"."""
    cause: str
    """The task that it starts right after; empty if there is none."""
    earlier: bool
    """Whether that is a task of the round before."""
    layer: int = -1
    group: int = -1
    slot: int = -1
    step: int = -1
    bytes: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class PlannedBubble:
    """A time in which the target's lane stands still."""

    start_us: float
    duration_us: float
    text: str


@dataclass(frozen=True)
class PlannedRound:
    """A plan, and what is predicted of a round of it."""

    id: int
    text: str
    """What `print(plan)` shows."""
    period_us: float
    link_floor_us: float
    """What its streamed bytes take on the link alone."""
    streamed_bytes: int
    busy_us: dict[str, float]
    """By lane."""
    exposed_draft_us: float
    hidden_draft_us: float
    why_exposed: str | None
    seats: tuple[dict[str, int], ...]
    """Of each: seat, resident and streamed chunks, chunks that are written out."""
    tasks: tuple[PlannedTask, ...]
    bubbles: tuple[PlannedBubble, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlannedRound:
        tasks = tuple(of(PlannedTask, each) for each in data["tasks"])
        bubbles = tuple(of(PlannedBubble, each) for each in data["bubbles"])
        return of(cls, {**data, "tasks": tasks, "bubbles": bubbles, "seats": tuple(data["seats"])})


@dataclass(frozen=True)
class MeasuredSpan:
    """A task as it ran. What was in flight when the round began may start before 0, what is ahead ends after it."""

    task: str
    start_us: float
    stop_us: float


@dataclass(frozen=True)
class RequestRound:
    """What a round was for one request."""

    request_id: int
    prompt_tokens: int
    """Of its prompt, computed in this round."""
    candidates: int
    accepted: int
    produced: int
    foreseen: bool | None = None
    """With lookahead: whether its outcome was one that candidates were drafted for."""


@dataclass(frozen=True)
class RecordedRound:
    """A round as it ran."""

    index: int
    start_us: float
    """Since the run began."""
    duration_us: float
    plan: int
    """Its `PlannedRound.id`."""
    streamed_bytes: int
    fetched_bytes: int
    requests: tuple[RequestRound, ...] = ()
    spans: tuple[MeasuredSpan, ...] = ()
    """None where only the whole round was measured."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordedRound:
        spans = tuple(of(MeasuredSpan, each) for each in data["spans"])
        requests = tuple(of(RequestRound, each) for each in data["requests"])
        return of(cls, {**data, "spans": spans, "requests": requests})


@dataclass(frozen=True)
class RoundSummary:
    """The little of a round that is read for all rounds at once."""

    index: int
    start_us: float
    duration_us: float
    plan: int
    streamed_bytes: int
    fetched_bytes: int
    prompt_tokens: int
    candidates: int
    accepted: int
    produced: int
    accepted_of: tuple[int, ...] = field(default=())
    """Of each verification with candidates: how many were accepted."""
    verifications: int = 0
    """Those without candidates included."""
    most_candidates: int = 0
    """Of one verification."""

    @classmethod
    def of(cls, recorded: RecordedRound) -> RoundSummary:
        requests = recorded.requests
        verified = [each for each in requests if not each.prompt_tokens]
        return cls(
            recorded.index,
            recorded.start_us,
            recorded.duration_us,
            recorded.plan,
            recorded.streamed_bytes,
            recorded.fetched_bytes,
            sum(each.prompt_tokens for each in requests),
            sum(each.candidates for each in requests),
            sum(each.accepted for each in requests),
            sum(each.produced for each in requests),
            tuple(each.accepted for each in verified if each.candidates),
            len(verified),
            max((each.candidates for each in verified), default=0),
        )


Record = TypeVar("Record")


def to_json(record: Any) -> str:
    """A record as one line of JSON."""
    return json.dumps(vars(record), default=vars, separators=(",", ":"))


def of(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """A record from its fields; those of a later version that this one does not know are left out.

    Raises:
        ValueError: a field is missing.
    """
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in known}
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
