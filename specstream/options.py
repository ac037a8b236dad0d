"""What a user can set, with sizes in words and the checks that need no model."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal

from specstream.closest import did_you_mean
from specstream.errors import InvalidOption

_WORDS = {
    "draft_sample_method": ("greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "coupled", "synthetic"),
    "drafting": ("auto", "off", "sequential", "cohorts", "lookahead"),
}

SELF = "self"
"""In the place of a draft: the target drafts for itself. A folder of that name is "./self"."""

SELF_WINDOW = 1024
"""Latest tokens that a target sees when it drafts for itself, unless `draft_window` says otherwise."""

MOST_AUTO_CANDIDATES = 16
"""Of a round, if their number is left to be chosen."""

Size = int | str
"""Bytes as an int, or text such as "4GiB", "512 MiB", "1.5e9"; "auto" where the field says so."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", start=1)}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", start=1)}


def parse_size(name: str, size: Size, words: str = "") -> int:
    """Bytes of a size; `words` are what else is allowed.

    Raises:
        InvalidOption: not a positive number of bytes.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2] in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise InvalidOption(name, size, f'a positive number of bytes or text such as "4GiB"{words}')
    return size


def format_size(size: float) -> str:
    """Bytes for people: 1536 -> '1.50 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


@dataclass(frozen=True)
class Options:
    """Options of `specstream.compile`. Every field is honoured or refused; "auto" is resolved by the memory plan.

    With draft=None an option that says how a draft works is refused by its name: draft_window, draft_sink,
    draft_sample_method, drafting (but for "auto" and "off"), lookahead_branches and synthetic acceptance. Two are not:
    num_speculative_tokens, which is the most candidates of a round, so that a script can leave out the draft and
    nothing else; and rejection_sample_method="coupled", which also says how the target alone samples. With
    drafting="off" all are allowed: it turns off a draft that is given, and what it would need stays as it is.

    Raises:
        InvalidOption: a value outside what its field allows, or options that contradict each other.
    """

    num_speculative_tokens: int | Literal["auto"] = 4
    """Candidates the draft proposes a round, at most. auto: as many as are predicted to give the most tokens, and fewer
    for a request whose candidates are often wrong."""
    max_model_len: int | Literal["auto"] = "auto"
    """Longest prompt plus output, in tokens. auto: what the target's positions cover."""
    max_num_seqs: int = 8
    """Requests in one round, at most."""
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    """Prompt tokens computed in one round, at most. auto: 8192 on a device with memory of its own, else 2048."""
    gpu_kv_budget: Size | Literal["auto", "min"] = "auto"
    """All target KV on the device: ring, tails, resident chunks. min: the least that works."""
    host_kv_budget: Size | Literal["auto"] = "auto"
    """Target KV in host memory. auto: most of what is free."""
    chunk_tokens: int | Literal["auto"] = "auto"
    """Tokens of a chunk, the unit of offload."""
    group_chunks: int | Literal["auto"] = "auto"
    """Chunks of a group, the unit of one fetch. auto: at most 16 groups a layer and request."""
    staging_slots: int | Literal["auto"] = "auto"
    """Groups in flight or being attended to at a time."""
    draft_window: int | Literal["auto"] | None = None
    """Latest tokens the draft's attention keeps; None: all, or 1024 if the target drafts for itself. auto: the same,
    until tuning with texts has found a better one."""
    draft_sink: int = 4
    """First tokens it keeps beside the window; only with draft_window."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """How candidates are drawn for a request that samples: the draft's best, or from its distribution."""
    rejection_sample_method: Literal["standard", "coupled", "synthetic"] = "standard"
    """How they are accepted. standard: the target's distribution. coupled: the target's own seeded sample.
    synthetic: as one of the next two says, to measure costs; the output is no text of the target."""
    synthetic_acceptance_rate: float | None = None
    """The chance that a candidate is accepted if those before it are."""
    synthetic_acceptance_length: float | None = None
    """Mean tokens a round, the target's own included."""
    drafting: Literal["auto", "off", "sequential", "cohorts", "lookahead"] = "auto"
    """When candidates are drafted. sequential: after each verification. cohorts: of two or more requests, half verify
    while the others are drafted for, by turns. lookahead: during each verification, for its likeliest outcomes, and
    after it if it had another one. auto: sequential, or cohorts or, for one request, lookahead where that is
    predicted to verify sooner. off: not at all, whatever draft is given."""
    lookahead_branches: int | Literal["auto"] = "auto"
    """Outcomes that lookahead drafts for in a round, of all requests together, at most. auto: 64, or 32 if the target
    drafts for itself."""
    debug: bool = False
    """Fill freed memory with NaN and prove every plan against the one before it."""

    def __post_init__(self) -> None:
        positive = {
            "num_speculative_tokens": 128,
            "max_num_seqs": 4096,
            "max_num_batched_tokens": 1 << 20,
            "max_model_len": 1 << 30,
            "chunk_tokens": 1 << 20,
            "group_chunks": 1 << 20,
            "staging_slots": 1024,
            "lookahead_branches": 1024,
        }
        for name, most in positive.items():
            value = getattr(self, name)
            auto_allowed = "auto" in str(self.__dataclass_fields__[name].type)
            if value == "auto" and auto_allowed:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                allowed = f"an integer from 1 to {most}" + (' or "auto"' if auto_allowed else "")
                raise InvalidOption(name, value, allowed)
        if self.draft_window not in (None, "auto") and (
            isinstance(self.draft_window, bool) or not isinstance(self.draft_window, int) or self.draft_window < 1
        ):
            allowed = 'a positive integer, "auto", or None (keep everything)'
            raise InvalidOption("draft_window", self.draft_window, allowed)
        if isinstance(self.draft_sink, bool) or not isinstance(self.draft_sink, int) or self.draft_sink < 0:
            raise InvalidOption("draft_sink", self.draft_sink, "an integer from 0")
        if self.draft_window is None and self.draft_sink != Options.draft_sink:
            allowed = f"{Options.draft_sink}, the default, without draft_window"
            raise InvalidOption("draft_sink", self.draft_sink, allowed, "Set draft_window too, or leave it out.")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                value, allowed = getattr(self, name), " or ".join(f'"{word}"' for word in words)
                raise InvalidOption(name, value, allowed, did_you_mean(value, words))
        if self.drafting == "cohorts" and self.max_num_seqs == 1:
            allowed = '"auto", "sequential", "lookahead" or "off" with max_num_seqs=1'
            raise InvalidOption("drafting", "cohorts", allowed, "Requests take turns: allow two or more.")
        if self.drafting not in ("lookahead", "off") and self.lookahead_branches != "auto":
            allowed = f'"auto" with drafting="{self.drafting}"'
            way_out = 'Leave it out, or set drafting="lookahead" for a draft.'
            raise InvalidOption("lookahead_branches", self.lookahead_branches, allowed, way_out)
        self._check_synthetic()
        if self.gpu_kv_budget not in ("auto", "min"):
            parse_size("gpu_kv_budget", self.gpu_kv_budget, ', or "auto" or "min"')
        if self.host_kv_budget != "auto":
            parse_size("host_kv_budget", self.host_kv_budget, ', or "auto"')
        if not isinstance(self.debug, bool):
            raise InvalidOption("debug", self.debug, "True or False")

    @property
    def most_candidates(self) -> int:
        """Of a round, at most; as long as it is "auto", what that can come to."""
        given = self.num_speculative_tokens
        return given if isinstance(given, int) else MOST_AUTO_CANDIDATES

    @property
    def without_draft(self) -> Options:
        """The same where nothing drafts: nothing is accepted either, so that every token is the target's."""
        method = self.rejection_sample_method if self.rejection_sample_method != "synthetic" else "standard"
        return replace(
            self,
            drafting="off",
            rejection_sample_method=method,
            synthetic_acceptance_rate=None,
            synthetic_acceptance_length=None,
        )

    def check_without_draft(self) -> None:
        """Refuses what would have no effect with draft=None."""
        neutral: dict[str, tuple[object, ...]] = {
            "draft_window": (None,),
            "draft_sample_method": ("probabilistic",),
            "rejection_sample_method": ("standard", "coupled"),
            "drafting": ("auto", "off"),
            "lookahead_branches": ("auto",),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in values:
                words = " or ".join(f'"{value}"' if value else "None" for value in values)
                allowed = f"{words} with draft=None"
                raise InvalidOption(name, getattr(self, name), allowed, "Give a draft, or leave it out.")

    def _check_synthetic(self) -> None:
        if self.num_speculative_tokens == "auto" and self.synthetic_acceptance_length is not None:
            allowed = "a number of candidates with synthetic_acceptance_length"
            raise InvalidOption("num_speculative_tokens", "auto", allowed)
        longest = 1 + self.most_candidates
        names = {"synthetic_acceptance_rate": (0, 1), "synthetic_acceptance_length": (1, longest)}
        given = [name for name in names if getattr(self, name) is not None]
        for name in given:
            value, (least, most) = getattr(self, name), names[name]
            if self.rejection_sample_method != "synthetic":
                raise InvalidOption(name, value, 'None without rejection_sample_method="synthetic"')
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not least <= value <= most:
                raise InvalidOption(name, value, f"a number from {least} to {most}")
        if self.rejection_sample_method == "synthetic" and len(given) != 1:
            allowed = "synthetic with one of synthetic_acceptance_rate and synthetic_acceptance_length"
            found = f"synthetic with {' and '.join(given) or 'neither'}"
            raise InvalidOption("rejection_sample_method", found, allowed)

    @classmethod
    def from_keywords(cls, draft: object = None, /, **keywords: object) -> Options:
        """Options from keyword arguments, for this draft, with an unknown name refused by name."""
        known = [f.name for f in fields(cls)]
        for name in keywords:
            if name not in known:
                allowed = f"no such option; the options are {', '.join(known)}"
                raise InvalidOption(name, keywords[name], allowed, did_you_mean(name, known))
        if isinstance(draft, str) and draft == SELF and keywords.get("draft_window") is None:
            keywords["draft_window"] = SELF_WINDOW
        return cls(**keywords)  # type: ignore[arg-type]
