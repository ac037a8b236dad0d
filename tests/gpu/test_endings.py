"""Ctrl-C and a process that is killed, with fetches under way: no hang, and nothing stays pinned or uncollected."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from specstream.pinned import Pinning
from tests.cuda_cases import cuda_engine, cuda_executor, expected_tokens, tokens_of

GIB = 1 << 30
PINNED = 4 * GIB

SERVE = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests run in the background
sys.path.append(sys.argv[1])
import torch
from specstream.pinned import Pinning
from tests.cuda_cases import cuda_engine, cuda_executor, expected_tokens, tokens_of

dtype = torch.float32
pinned = Pinning(({PINNED},), torch.uint8, torch.device("cuda")).wait() if "pin" in sys.argv else None
expected = expected_tokens(dtype)
engine = cuda_engine(dtype, drafts=True)
"""
CATCH = """
for _ in range(5):
    try:
        print("ready", flush=True)
        while True:
            tokens_of(engine)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        engine.reset()
        print("same" if tokens_of(engine) == expected else "other", flush=True)
engine.close()
"""
GO_ON = """
print("ready", flush=True)
while True:
    tokens_of(engine)
"""


@contextmanager
def child(root: Path, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, killed at the end and after two minutes at the latest."""
    command = [sys.executable, "-c", script, str(root), *arguments]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        try:
            yield process
        finally:
            late.cancel()
            process.kill()


def available() -> int:
    """Bytes of host memory that nobody uses."""
    return int(psutil.virtual_memory().available)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def interrupted(process: subprocess.Popen[str]) -> str:
    """Sends Ctrl-C until the process says something: one that strikes in a finaliser is lost in any Python program."""
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(line(process)))
    reader.start()
    while reader.is_alive():
        process.send_signal(signal.SIGINT)
        reader.join(timeout=5)
    return said[0]


def test_ctrl_c_is_caught_and_the_engine_goes_on(root: Path) -> None:
    chooser = random.Random(0)
    with child(root, SERVE + CATCH) as process:
        for _ in range(5):
            assert line(process) == "ready", process.communicate()[1]
            time.sleep(chooser.uniform(0.05, 0.5))
            assert interrupted(process) == "interrupted", process.communicate()[1]
            assert line(process) == "same", process.communicate()[1]
        assert process.wait(timeout=30) == 0


def test_ctrl_c_that_nobody_catches_ends_the_process(root: Path) -> None:
    with child(root, SERVE + GO_ON) as process:
        assert line(process) == "ready", process.communicate()[1]
        time.sleep(0.3)
        assert interrupted(process) == ""  # the end of its output
        _, shown = process.communicate(timeout=30)
        # Python's status is that of the signal, unless something at exit executes a string as code: then it is 1.
        assert shown.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode != 0


def test_what_a_killed_process_had_pinned_is_free_again(root: Path) -> None:
    before, device_before = available(), torch.cuda.mem_get_info()[0]
    with child(root, SERVE + GO_ON, "pin") as process:
        assert line(process) == "ready", process.communicate()[1]
        assert psutil.Process(process.pid).memory_info().rss > PINNED
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while (
        psutil.virtual_memory().available < before - PINNED // 2 or torch.cuda.mem_get_info()[0] < device_before - GIB
    ):
        assert time.monotonic() < deadline, "its memory is still in use"
        time.sleep(0.1)
    again = Pinning((PINNED,), torch.uint8, torch.device("cuda")).wait()
    assert again.is_pinned()
    with cuda_engine(torch.float32, drafts=True) as engine:
        assert tokens_of(engine) == expected_tokens(torch.float32)


def test_the_collector_leaves_models_alone_as_long_as_there_is_an_engine() -> None:
    """Which it would look through in the middle of rounds. Of an engine that nobody closed the memory comes back."""
    with cuda_engine(torch.float32, drafts=True):
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0
    unclosed = cuda_engine(torch.float32, drafts=True)
    gone = weakref.ref(cuda_executor(unclosed).store)
    del unclosed
    with cuda_engine(torch.float32, drafts=True):
        assert gone() is None
