"""Made-up runs and their folders, written by hand as the format says."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from specstream.traces.records import (
    MeasuredSpan,
    PlannedBubble,
    PlannedRound,
    PlannedTask,
    RecordedRound,
    RequestRound,
    RoundSummary,
    RunInfo,
    to_json,
)

GROUP_BYTES = 500_000
LINK_BYTES_PER_US = 50_000.0
FETCH_US = GROUP_BYTES / LINK_BYTES_PER_US
"""Of a group: 10 us. An attend takes half of it, so that the target waits for the link."""


def run_info(name: str = "run", **changes: object) -> RunInfo:
    fields = {
        "name": name,
        "started": "2026-01-02T03:04:05Z",
        "kind": "engine",
        "machine": {"device": "made up", "cpus": 2},
        "versions": {"specstream": "0.1.0"},
        "target": "a-target",
        "draft": "a-draft",
        "options": {"num_speculative_tokens": 4},
        "memory": {"weights": 300 << 20, "ring": 20 << 20, "device_kv": 80 << 20},
        "link_bytes_per_us": LINK_BYTES_PER_US,
    }
    return RunInfo(**(fields | changes))  # type: ignore[arg-type]


def planned_round(number: int = 0, layers: int = 3, groups: int = 4, draft_us: float = 20.0) -> PlannedRound:
    """A round that streams: the target attends to each group once it is there, then two draft steps follow.

    The draft is waited for by the next round's first piece: its time is exposed, the first bubble's.
    """
    tasks: list[PlannedTask] = []
    bubbles: list[PlannedBubble] = []
    link = target = 0.0
    tasks.append(PlannedTask("piece/0", "target", "piece", 0, 5, 2 * draft_us, "host", "draft/1", True, 0))
    bubbles.append(PlannedBubble(-2 * draft_us, 2 * draft_us, "before piece/0, for draft/1 of the round before"))
    target = 5.0
    for layer in range(layers):
        for group in range(groups):
            fetch, attend = f"fetch/{layer}/{group}", f"attend/{layer}/{group}"
            cause = tasks[-1].name if tasks[-1].lane == "link" else ""
            tasks.append(
                PlannedTask(
                    fetch,
                    "link",
                    "fetch",
                    link,
                    link + FETCH_US,
                    0,
                    "lane",
                    cause,
                    False,
                    layer,
                    group,
                    group % 2,
                    bytes=GROUP_BYTES,
                )
            )
            link += FETCH_US
            start = max(target, link)
            idle, before = start - target, f"attend/{layer}/{group - 1}" if group else "piece/0"
            why = ("waits for", fetch) if idle else ("lane", before)
            if idle:
                bubbles.append(PlannedBubble(target, idle, f"{idle:.0f} us before {attend}, for {fetch}"))
            target = start + FETCH_US / 2
            tasks.append(
                PlannedTask(attend, "target", "attend", start, target, idle, *why, False, layer, group, group % 2)
            )
    tasks.append(PlannedTask("accept", "target", "accept", target, target + 3, 0, "lane", tasks[-1].name, False))
    start = target + 3
    for step in range(2):
        before = f"draft/{step - 1}" if step else "accept"
        tasks.append(
            PlannedTask(
                f"draft/{step}",
                "draft",
                "draft",
                start,
                start + draft_us,
                0,
                "lane" if step else "waits for",
                before,
                False,
                step=step,
            )
        )
        start += draft_us
    busy = {lane: sum(t.stop_us - t.start_us for t in tasks if t.lane == lane) for lane in ("target", "link", "draft")}
    return PlannedRound(
        id=number,
        text=f"plan {number}\n  target |####|",
        period_us=start,
        link_floor_us=link,
        streamed_bytes=layers * groups * GROUP_BYTES,
        busy_us=busy,
        exposed_draft_us=2 * draft_us,
        hidden_draft_us=0.0,
        why_exposed="the target waits for the draft",
        seats=({"seat": 0, "resident": 1, "streamed": groups, "offload": 0},),
        tasks=tuple(tasks),
        bubbles=tuple(bubbles),
    )


def recorded_round(plan: PlannedRound, index: int, slower: float = 1.1, spans: bool = True) -> RecordedRound:
    """The plan's round as if everything took `slower` times as long as planned; the first is of a prompt."""
    duration = plan.period_us * slower
    measured = tuple(MeasuredSpan(t.name, t.start_us * slower, t.stop_us * slower) for t in plan.tasks)
    accepted = index % 5
    verified = (RequestRound(0, 0, 4, accepted, accepted + 1), RequestRound(1, 0, 0, 0, 1))
    return RecordedRound(
        index,
        index * duration,
        duration,
        plan.id,
        plan.streamed_bytes,
        plan.streamed_bytes + GROUP_BYTES,
        (RequestRound(0, 512, 0, 0, 0),) if index == 0 else verified,
        measured if spans else (),
    )


def write_run(
    folder: Path,
    info: RunInfo,
    plans: Iterable[PlannedRound],
    rounds: Iterable[RecordedRound],
    rounds_in_file: int = 64,
) -> Path:
    """Writes the folder of a run, and returns it."""
    top = folder / "specstream"
    (top / "rounds").mkdir(parents=True)
    (top / "run.json").write_text(to_json(info))
    (top / "plans.jsonl").write_text("".join(f"{to_json(plan)}\n" for plan in plans))
    kept = list(rounds)
    (top / "summary.jsonl").write_text("".join(f"{to_json(RoundSummary.of(each))}\n" for each in kept))
    for first in range(0, len(kept), rounds_in_file):
        part = kept[first : first + rounds_in_file]
        write_rounds(top / "rounds" / f"{part[0].index:06}.json.gz", [to_json(each) for each in part])
    return folder


def write_rounds(path: Path, rounds: list[str]) -> None:
    path.write_bytes(gzip.compress(f"[{','.join(rounds)}]".encode(), compresslevel=1))
