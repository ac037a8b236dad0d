"""Roofline costs: the few figures of a device from which a task's duration is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.round_graph import Task, TaskKind


@dataclass(frozen=True)
class DeviceProfile:
    """A device and its link, as a roofline. Rates are those a program gets, not the most a data sheet promises.

    1 GB/s is 1000 bytes a microsecond, 1 TFLOP/s is a million operations.
    """

    name: str
    """What a user types."""
    torch_names: tuple[str, ...]
    """What `torch.cuda.get_device_name` calls it."""
    device_memory_bytes: int | None
    """None where the device is the host, whose size it has."""
    host_to_device_bytes_per_us: float
    device_to_host_bytes_per_us: float
    memory_bytes_per_us: float
    """Reads and writes of the device's own memory."""
    flops_per_us: float
    """Of dense matrices in half precision."""
    launch_us: float
    """Fixed cost of a task that is one launch; small kernels take no longer."""
    source: str
    """Where the figures come from."""
    measured_on: str | None = None
    """When they were measured on the very device that is meant; None: they are listed."""

    @property
    def title(self) -> str:
        """Its name, and whether it was measured."""
        return self.name if self.measured_on is None else f"{self.name}, measured {self.measured_on}"

    def cost_us(self, task: Task) -> float:
        """Predicted duration: fixed costs, plus what takes longer, moving the bytes or computing."""
        fixed = task.launches * self.launch_us
        if task.kind is TaskKind.FETCH:
            return fixed + task.link_bytes / self.host_to_device_bytes_per_us
        if task.kind is TaskKind.OFFLOAD:
            return fixed + task.link_bytes / self.device_to_host_bytes_per_us
        return fixed + max(task.memory_bytes / self.memory_bytes_per_us, task.flops / self.flops_per_us)
