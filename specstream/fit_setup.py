"""What `specstream.plan` is asked about: models without weights, a device, options; and whether that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specstream.cost import DeviceProfile
from specstream.errors import OutOfBudget
from specstream.memory import MemoryPlan
from specstream.options import Options, format_size
from specstream.planning import Planning
from specstream.profiles import PROFILES
from specstream.rehearsal import Rehearsal, rehearse
from specstream.shapes import ModelShapes

UNLIMITED = 1 << 60
"""Bytes: more than any machine has."""
LEAST_CONTEXT, MOST_CONTEXT, MOST_BATCH = 3, 1 << 30, 4096
"""As far as options go."""


@dataclass(frozen=True)
class Setup:
    """Requests of `max_model_len` tokens, `max_num_seqs` of them at once."""

    target: ModelShapes
    draft: ModelShapes | None
    profile: DeviceProfile
    options: Options
    here: bool
    """Whether the device is this machine's, whose free host memory counts; another's is not known."""
    stretches: bool = False
    """Whether the target's rotary embedding can be made to reach any context, as a preset's can."""

    @property
    def weights(self) -> int:
        return self.planning.target.weight_bytes + self.planning.draft_weights

    @property
    def planning(self) -> Planning:
        target, capacity = self.target, self.profile.device_memory_bytes
        if self.stretches:
            reach = max(target.spec.max_positions or 0, self.context)
            target = replace(target, spec=replace(target.spec, max_positions=reach))
        draft = target if self.draft is self.target else self.draft
        planning = Planning(target, draft, self.profile, None, None if self.here else UNLIMITED)
        if capacity is None:
            return planning
        return replace(planning, free_device=capacity - target.weight_bytes - planning.draft_weights)

    @property
    def context(self) -> int:
        assert isinstance(self.options.max_model_len, int)
        return self.options.max_model_len

    @property
    def batch(self) -> int:
        return self.options.max_num_seqs

    @property
    def host_is_known(self) -> bool:
        """Whether it is known how much host memory there is for KV."""
        return self.here or self.options.host_kv_budget != "auto"

    def changed(self, **options: Any) -> Setup:
        """The same with other options."""
        return replace(self, options=replace(self.options, **options))

    def on_device_of(self, size: int) -> Setup:
        """The same with so many bytes of device memory."""
        return replace(self, profile=replace(self.profile, device_memory_bytes=size))

    def at(self, *, context: int | None = None, batch: int | None = None) -> Setup:
        """The same with another context or number of requests."""
        return self.changed(max_model_len=context or self.context, max_num_seqs=batch or self.batch)

    @property
    def least_options(self) -> Options:
        """With the policy and the number of candidates that take the least memory in place of "auto": an engine chooses
        among those that fit."""
        settled = self.options
        if settled.num_speculative_tokens == "auto":
            settled = replace(settled, num_speculative_tokens=1)
        return replace(settled, drafting="sequential") if settled.drafting == "auto" else settled

    def refusal(self) -> str | None:
        """Why it does not fit; None if it does. No rounds are predicted for that.

        An engine's own way out is left out: it is for one request at a time, and all of these are to run at once.
        """
        try:
            self.rehearsed(self.least_options)
        except OutOfBudget as error:
            return error.reason
        return None

    def rehearsed(self, settled: Options) -> tuple[MemoryPlan, Rehearsal]:
        """The memory plan of options without "auto" policy and number of candidates, with all requests running.

        Raises:
            OutOfBudget: the models, the memory plan or the requests do not fit.
        """
        planning = self.planning
        if planning.free_device is not None and planning.free_device <= 0:
            capacity = planning.free_device + self.weights
            raise OutOfBudget(f"the weights take {format_size(self.weights)}; the device has {format_size(capacity)}")
        memory = planning.memory(settled)
        running = rehearse(memory, self.batch)
        if running.running < self.batch:
            raise NotAtOnce(memory, running, self.batch)
        return memory, running

    def max_context(self) -> int:
        """The longest context with which as many requests fit; 0 if none does."""
        most = MOST_CONTEXT if self.stretches else min(MOST_CONTEXT, self.target.spec.max_positions or MOST_CONTEXT)
        return largest(LEAST_CONTEXT, most, lambda context: self.at(context=context).refusal() is None)

    def max_batch(self) -> int:
        """The most requests of that context which fit at once; 0 if not even one does."""
        least = 2 if self.options.drafting == "cohorts" else 1
        return largest(least, MOST_BATCH, lambda batch: self.at(batch=batch).refusal() is None)

    def min_gpu(self) -> str | None:
        """Of the listed devices with memory of their own on which it fits, one with the least memory."""
        listed = [profile for profile in PROFILES if profile.device_memory_bytes is not None]
        fitting = (each for each in listed if replace(self, profile=each, here=False).refusal() is None)
        best = min(fitting, key=lambda profile: profile.device_memory_bytes or 0, default=None)
        return None if best is None else best.name


class NotAtOnce(OutOfBudget):
    """Requests would have to wait for others."""

    def __init__(self, memory: MemoryPlan, rehearsal: Rehearsal, batch: int) -> None:
        self.memory, self.rehearsal = memory, rehearsal
        super().__init__(f"{rehearsal.running} of {batch} requests run at once: those take the memory that there is")


def largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """By bisection a number that fits, whose successor does not or is `most`; 0 if not even the least fits.

    Where all numbers up to a limit fit, and no others, that is the limit.
    """
    if least > most or not fits(least):
        return 0
    fitting, step = least, 1
    while fitting < most and fits(larger := min(most, fitting + step)):  # large numbers take long to try
        fitting, step = larger, 2 * step
    too_large = fitting + 1 if fitting == most else min(most, fitting + step)
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting
