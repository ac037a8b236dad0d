"""Device profiles: the few figures from which a task's duration is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from specstream.round_graph import Task, TaskKind


@dataclass(frozen=True)
class DeviceProfile:
    """A device and its link, as a roofline."""

    name: str
    link_bytes_per_us: float
    """Host-to-device copies; 1 GB/s is 1000 bytes per us."""
    memory_bytes_per_us: float
    launch_us: float
    """Fixed cost of a task."""

    def cost_us(self, task: Task) -> float:
        """Predicted duration: a fixed cost, plus the bytes at the speed of what moves them."""
        if task.kind in (TaskKind.FETCH, TaskKind.OFFLOAD):
            return self.launch_us + task.link_bytes / self.link_bytes_per_us
        return self.launch_us + task.memory_bytes / self.memory_bytes_per_us


CUDA_PROFILE = DeviceProfile("cuda", link_bytes_per_us=55_000, memory_bytes_per_us=4_200_000, launch_us=5)
"""One H200 on PCIe 5 x16, in round figures."""
CPU_PROFILE = DeviceProfile("cpu", link_bytes_per_us=5_000, memory_bytes_per_us=5_000, launch_us=30)
"""Two cores of a server, in round figures: host and device tier are the same memory."""
