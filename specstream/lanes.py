"""Lanes of the CPU executor: in-order queues served by a thread each, as streams are on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class Event:
    """The moment everything put on a lane before `record` was done.

    Made of a bare lock, not of `threading.Event`: that holds locks of its own in Python code, which an interrupt in
    the middle of a wait would leave locked for good.
    """

    __slots__ = ("_done", "_lock")

    def __init__(self) -> None:
        self._done = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Called once."""
        self._done = True
        self._lock.release()

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Blocks until set, or until `cancelled` says that it never will be."""
        while not self._done:
            if self._lock.acquire(timeout=0.05):
                self._lock.release()  # for the next who waits; whoever misses it looks again
            elif cancelled():
                return


class WorkerLane:
    """A thread that runs what is put on it, in order.

    After an exception or `cancel` the rest of the queue is skipped, but events are still set, so that nobody who
    waits for the lane hangs; `raise_error` then tells. Work is of a generation: an interrupted `cancel` has ended it
    all the same, and what is put on the lane afterwards runs.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._generation = 0
        self._failed = -1
        """The generation that `_error` stopped."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"specstream-{name}", daemon=True)
        self._thread.start()

    def launch(self, work: Work) -> None:
        generation = self._generation
        self._queue.put(lambda: self._run(generation, work))

    def record(self, event: Event) -> None:
        self._queue.put(event.set)

    def wait(self, event: Event) -> None:
        generation = self._generation
        self._queue.put(lambda: event.wait(lambda: self._over(generation)))

    def synchronize(self) -> None:
        """Blocks until the lane is empty.

        Raises:
            The exception that stopped the lane, once.
        """
        self._wait_until_empty()
        self.raise_error()

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None and self._failed == self._generation:
            raise error

    def cancel(self) -> None:
        """Skips what is queued, waits for what runs, and makes the lane usable again."""
        self._generation += 1
        self._wait_until_empty()

    def close(self) -> None:
        """Ends the thread; if it is interrupted, it can be called again."""
        self.cancel()
        self._queue.put(None)
        self._thread.join()

    def _wait_until_empty(self) -> None:
        done = Event()
        self.record(done)
        done.wait(lambda: not self._thread.is_alive())

    def _over(self, generation: int) -> bool:
        return generation < self._generation or generation == self._failed

    def _run(self, generation: int, work: Work) -> None:
        if self._over(generation):
            return
        try:
            work()
        except BaseException as error:
            self._error, self._failed = error, generation

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
