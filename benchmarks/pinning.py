"""How long host memory takes to be pinned: by the driver alone, and made present by many threads before.

python benchmarks/pinning.py [--gib 8]
"""

from __future__ import annotations

import argparse
import mmap
import time

import torch

from specstream.pinned import Pinning


def by_the_driver_alone(size: int) -> float:
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = time.perf_counter()
    torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 0)
    seconds = time.perf_counter() - start
    torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())
    return seconds


def in_the_background(size: int) -> float:
    start = time.perf_counter()
    Pinning((size,), torch.uint8, torch.device("cuda")).wait()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="how much (8)")
    size = int(parser.parse_args().gib * 2**30)
    torch.cuda.init()
    for name, seconds in (("driver alone", by_the_driver_alone(size)), ("present before", in_the_background(size))):
        print(f"{name:<16} {seconds:6.2f} s, {seconds / size * 2**30:.3f} s a GiB")


if __name__ == "__main__":
    main()
