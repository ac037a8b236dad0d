"""What can be tuned: sizes of chunks, groups and ring, the number of candidates, when and for what they are drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from specstream.depth import DEPTHS
from specstream.errors import OutOfBudget
from specstream.memory import resolve_max_model_len
from specstream.options import Options
from specstream.planning import Planning

CHUNKS, OWN_DEVICE_CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), (128, 256, 512, 1024, 2048, 4096)
"""Tokens. On a device of its own rounds take longer with smaller ones than is predicted: with chunks of 64 by 4 ms of
58, of Qwen3-8B on an H200, 14,000 tokens of whose history stay there."""
MORE_DEPTHS = (*DEPTHS, 24, 32)
BRANCHES, MORE_BRANCHES = "lookahead_branches", (8, 16, 32, 64, 128)
"""That a draft step serves at a time."""
WINDOW, MORE_WINDOWS = "draft_window", (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens."""
OF_TARGET = ("chunk_tokens", "group_chunks", "staging_slots")
"""Settings that there are without a draft too."""
Drafting = Literal["sequential", "cohorts", "lookahead", "off"]


@dataclass(frozen=True)
class TunedSettings:
    """Values of options that an engine would otherwise choose by what it predicts."""

    chunk_tokens: int
    group_chunks: int
    staging_slots: int
    num_speculative_tokens: int
    drafting: Drafting
    lookahead_branches: int = 0
    """0 with another policy."""
    draft_window: int | None = None
    """None: the draft keeps all."""

    @classmethod
    def chosen(cls, options: Options, planning: Planning) -> TunedSettings:
        """What an engine of these options would have.

        Raises:
            OutOfBudget: memory that does not suffice.
        """
        settled = planning.settled(options)
        memory = planning.memory(settled)
        drafting: Drafting = "off" if settled.drafting == "auto" else settled.drafting
        return cls(
            memory.layout.chunk_tokens,
            memory.chunks_per_group,
            memory.staging_slots,
            settled.most_candidates,
            drafting,
            planning.fan_out(settled).branches if drafting == "lookahead" else 0,
            planning.window(settled).window,
        )

    def given_to(self, options: Options) -> Options:
        """The options with these values where they say "auto"."""
        return _with(options, self._open(options))

    def _open(self, options: Options) -> dict[str, Any]:
        """Those that are left to be chosen."""
        settings = {name: getattr(self, name) for name in open_settings(options)}
        if settings.get(BRANCHES) == 0:
            settings[BRANCHES] = "auto"
        return settings

    @property
    def words(self) -> dict[str, int | str]:
        """For whom a value has to be a number or a word."""
        return {name: "all" if value is None else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        drafts = "" if self.drafting == "off" else f", {self.num_speculative_tokens} candidates, {self.drafting}"
        branches = f", {self.lookahead_branches} branches" if self.lookahead_branches else ""
        sizes = f"chunks of {self.chunk_tokens}, {self.group_chunks} a group, {self.staging_slots} slots"
        window = f", a window of {self.draft_window}" if self.draft_window is not None else ""
        return sizes + drafts + branches + window


def open_settings(options: Options) -> list[str]:
    """Which are left to be chosen."""
    names = [field.name for field in fields(TunedSettings) if getattr(options, field.name) == "auto"]
    return [name for name in names if name != BRANCHES or options.drafting in ("auto", "lookahead")]


def _with(options: Options, settings: dict[str, Any]) -> Options:
    if settings.get(WINDOW, "") is None:  # where nothing is left out there is no number of sinks
        settings = settings | {"draft_sink": Options.draft_sink}
    return replace(options, **settings)


def changes(
    options: Options, planning: Planning, *, texts: bool = False
) -> dict[str, Callable[[TunedSettings], Sequence[TunedSettings]]]:
    """For each setting that is open, what settings become with other values of it; those that do not fit are left out.
    Where nothing streams there is nothing to say about how it does, nor without texts about windows. Groups of other
    chunks have as many tokens; a number of candidates or a policy brings its own ring, if that is open.
    """
    names = open_settings(options)
    if planning.draft is None:
        names = [name for name in names if name in OF_TARGET]
    if planning.memory(planning.settled(options)).all_resident:
        names = [name for name in names if name not in OF_TARGET]
    if not texts:
        names = [name for name in names if name != WINDOW]
    return {name: partial(_changed, name, options, planning) for name in ORDER if name in names}


ORDER = ("drafting", "num_speculative_tokens", WINDOW, BRANCHES, "chunk_tokens", "group_chunks", "staging_slots")
BRING_A_RING = ("drafting", "num_speculative_tokens")


def _changed(name: str, options: Options, planning: Planning, now: TunedSettings) -> list[TunedSettings]:
    names, found = open_settings(options), list[TunedSettings]()
    for value in _values(name, options, planning, now):
        settings = now._open(options) | {name: value}
        if name == "drafting" and BRANCHES in names:
            settings[BRANCHES] = "auto"
        if name in BRING_A_RING and "staging_slots" in names:
            settings["staging_slots"] = "auto"
        if name == "chunk_tokens" and "group_chunks" in names:
            settings["group_chunks"] = max(1, now.group_chunks * now.chunk_tokens // settings[name])
        with suppress(OutOfBudget):
            found.append(TunedSettings.chosen(_with(options, settings), planning))
    return [settings for settings in dict.fromkeys(found) if settings != now]


def _values(name: str, options: Options, planning: Planning, now: TunedSettings) -> Sequence[int | str | None]:
    if name == "drafting":
        policies = [*(["cohorts"] if options.max_num_seqs > 1 else []), "sequential", "lookahead"]
        if planning.profile.device_memory_bytes is None:  # drafts do not run beside the target there
            policies = ["sequential"]
        return [policy for policy in policies if policy != now.drafting]
    if name == "num_speculative_tokens":
        return MORE_DEPTHS
    if name == WINDOW:
        return _next_windows(options, planning, now)
    if name == BRANCHES:
        return _neighbours(MORE_BRANCHES, now.lookahead_branches) if now.drafting == "lookahead" else ()
    if name == "chunk_tokens":
        return OWN_DEVICE_CHUNKS if planning.free_device is not None else CHUNKS
    if name == "group_chunks":
        most = -(-resolve_max_model_len(options, planning.target.spec) // now.chunk_tokens)
        return [*(1 << power for power in range(most.bit_length())), most]
    layers = planning.target.spec.num_layers
    return sorted({2, 3, 4, 8, *(slots for slots in range(2, 19) if layers % slots == 0)})


def _next_windows(options: Options, planning: Planning, now: TunedSettings) -> list[int | None]:
    """The next smaller window and the next larger one: how often candidates are right with another is not predicted."""
    longest = resolve_max_model_len(options, planning.target.spec)
    windows = [window for window in MORE_WINDOWS if window < longest]
    if planning.draft is not planning.target:
        windows.append(longest)
    now_seen = longest if now.draft_window is None else now.draft_window
    return [None if window == longest else window for window in _neighbours(windows, now_seen)]


def _neighbours(values: Sequence[int], now: int) -> list[int]:
    """The next smaller one and the next larger one: for what is not predicted well enough to choose from all."""
    return [value for value in values if value < now][-1:] + [value for value in values if value > now][:1]
