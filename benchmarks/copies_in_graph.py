"""Copies as nodes of a round's graph, or launched beside a graph of compute that waits for flags: which is faster?

    python benchmarks/copies_in_graph.py [--groups 288] [--group-mib 16] [--slots 4]

Needs a CUDA device and cuda.bindings. Both run the same ring: groups are copied from pinned memory into slots in turn,
and a small kernel reads each. Prints the time of each beside what the bytes need on the link, and the host's time to
launch.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch

from specstream.device_copy import Transfer
from specstream.pinned import Pinning
from specstream.rates import link_bandwidth
from specstream.streams import new_stream, record

TRIALS = 4
FILLED, FREE = 1, 0


class Ring:
    """The slots, their flags, and the two streams."""

    def __init__(self, groups: int, size: int, slots: int) -> None:
        device = torch.device("cuda")
        self.groups, self.slots = groups, slots
        self.host = Pinning((min(groups, 64), size), torch.uint8, torch.device("cuda")).wait()
        self.ring = torch.empty(slots, size, dtype=torch.uint8, device=device)
        self.flags = torch.full((slots,), FREE, dtype=torch.int32, device=device)
        self.sums = torch.zeros(groups, dtype=torch.int64, device=device)
        self.target, self.link = (new_stream(device, high_priority=True) for _ in range(2))

    def copy(self, group: int) -> None:
        source = self.host[group % len(self.host)]
        slot = self.ring[group % self.slots]
        Transfer(slot.data_ptr(), source.data_ptr(), source.nbytes, True).launch(self.link.cuda_stream)

    def read(self, group: int) -> None:
        with torch.cuda.stream(self.target):
            self.sums[group] = self.ring[group % self.slots, :1024].sum()

    def flag(self, group: int, stream: torch.cuda.Stream, wait_for: int, then: int | None) -> None:
        """Waits for a slot's flag, or sets it."""
        from cuda.bindings import driver

        address = self.flags.data_ptr() + 4 * (group % self.slots)
        calls: Any = driver
        if then is None:
            equal = calls.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
            answer = calls.cuStreamWaitValue32(stream.cuda_stream, address, wait_for, equal)
        else:
            default = calls.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
            answer = calls.cuStreamWriteValue32(stream.cuda_stream, address, then, default)
        assert int(answer[0]) == 0, answer

    def launch_copies(self) -> None:
        for group in range(self.groups):
            self.flag(group, self.link, FREE, None)
            self.copy(group)
            self.flag(group, self.link, FREE, FILLED)

    def compute_with_waits(self) -> None:
        for group in range(self.groups):
            self.flag(group, self.target, FILLED, None)
            self.read(group)
            self.flag(group, self.target, FILLED, FREE)

    def everything(self) -> None:
        self.link.wait_stream(self.target)
        read: dict[int, torch.cuda.Event] = {}
        for group in range(self.groups):
            if group >= self.slots:
                self.link.wait_event(read[group - self.slots])
            self.copy(group)
            self.target.wait_event(record(self.link))
            self.read(group)
            read[group] = record(self.target)
        self.target.wait_stream(self.link)

    def captured(self, body: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.target, capture_error_mode="thread_local"):
            body()
        return graph


def measure(ring: Ring, graph: torch.cuda.CUDAGraph, beside: bool) -> tuple[float, float]:
    """Least milliseconds of a replay, and of its launch."""
    times, launches = [], []
    for _ in range(TRIALS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        worker = threading.Thread(target=ring.launch_copies)
        if beside:
            worker.start()
        before = time.perf_counter()
        with torch.cuda.stream(ring.target):
            graph.replay()
        launches.append(time.perf_counter() - before)
        if beside:
            worker.join()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times), 1e3 * min(launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=288)
    parser.add_argument("--group-mib", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4)
    given = parser.parse_args()
    ring = Ring(given.groups, given.group_mib << 20, given.slots)
    ring.read(0)
    torch.cuda.synchronize()
    floor = 1e3 * ring.groups * ring.host[0].nbytes / link_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: the bytes need {floor:.2f} ms")
    for name, body, beside in (
        ("copies in the graph", ring.everything, False),
        ("graph of compute, copies beside it", ring.compute_with_waits, True),
    ):
        took, launch = measure(ring, ring.captured(body), beside)
        print(f"{name:<36} {took:7.2f} ms ({floor / took:.4f} of the link), launch {launch:.2f} ms")


if __name__ == "__main__":
    main()
