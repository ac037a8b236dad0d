"""Interrupts at any moment: nothing hangs, no memory is given away twice, and the engine goes on as if new."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from specstream.errors import EngineClosed, SpecStreamError
from specstream.kv import DeviceStore, HostStore
from specstream.lanes import Event
from specstream.scheduler import Scheduler
from tests.helpers import best, check_free, cpu_executor, new_engine, prompt


class Once:
    """Calls through, but raises KeyboardInterrupt before or after the n-th call."""

    def __init__(self, method: Any, number: int, after: bool) -> None:
        self.method, self.left, self.after = method, number, after

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        result = self.method(*arguments)
        if self.left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(HostStore, "release"), (DeviceStore, "give_back"), (Scheduler, "remove"), (DeviceStore, "take")],
)
def test_memory_that_changes_hands(
    owner: type, name: str, number: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_engine(gpu_kv_budget="min", debug=False) as engine:
        ids = [list(prompt(9, seed)) for seed in range(4)]
        with monkeypatch.context() as patch:
            once = Once(getattr(owner, name), number, after)
            patch.setattr(owner, name, lambda self, *arguments: once(self, *arguments))
            with pytest.raises(KeyboardInterrupt):
                engine.generate(ids, max_new_tokens=9)
        assert not engine.has_unfinished
        check_free(engine)
        out: Any = engine.generate(ids, max_new_tokens=9)
        assert [row[9:] for row in out.tolist()] == [best(prompt(9, seed), 9) for seed in range(4)]
        check_free(engine)


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_at_random_moments(alarm: None) -> None:
    chooser = random.Random(0)
    ids = [list(prompt(9, seed)) for seed in range(3)]
    expected = [best(prompt(9, seed), 12) for seed in range(3)]
    struck = 0
    with new_engine(gpu_kv_budget="min", debug=False) as engine:
        for attempt in range(150):
            gc.disable()  # an interrupt in a finaliser is not raised
            try:
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(0.0005, 0.03))
                engine.generate(ids, max_new_tokens=12)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                struck += 1
            finally:
                gc.enable()
            if attempt % 10 == 9:
                assert not engine.has_unfinished
                check_free(engine)
                out: Any = engine.generate(ids, max_new_tokens=12)
                assert [row[9:] for row in out.tolist()] == expected
    assert struck > 50


def test_an_event_whose_waiter_was_interrupted_still_wakes_the_others(alarm: None) -> None:
    for _ in range(20):
        event = Event()
        others = [threading.Thread(target=event.wait, args=(lambda: False,)) for _ in range(3)]
        for thread in others:
            thread.start()
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        with pytest.raises(KeyboardInterrupt):
            event.wait(lambda: False)
        event.set()
        for thread in others:
            thread.join(timeout=5)
        assert not any(thread.is_alive() for thread in others)


def test_a_stream_dropped_in_another_thread_disturbs_nobody() -> None:
    with new_engine() as engine:
        for _ in range(10):
            pieces = [engine.stream([list(prompt(5))], max_new_tokens=20)]
            next(pieces[0])
            failures: list[BaseException] = []
            dropper = threading.Thread(target=pieces.clear)
            dropper.start()
            try:
                out: Any = engine.generate([list(prompt(9))], max_new_tokens=8)
            except SpecStreamError as error:
                failures.append(error)
            dropper.join()
            assert not failures
            assert out[0, 9:].tolist() == best(prompt(9), 8)
        assert not engine.has_unfinished
        check_free(engine)


@pytest.mark.parametrize("strike", [1, 2])
def test_while_fetches_are_dropped(strike: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been fetched ahead is of no use afterwards."""
    with new_engine(gpu_kv_budget="min") as engine:
        engine.submit(prompt(20), max_new_tokens=15)
        for _ in range(3):
            engine.step()
        main, wait, left = threading.current_thread(), Event.wait, [strike]

        def struck(self: Event, cancelled: Any) -> None:
            if threading.current_thread() is main:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            wait(self, cancelled)

        with monkeypatch.context() as patch:
            patch.setattr(Event, "wait", struck)
            with pytest.raises(KeyboardInterrupt):
                engine.reset()
        engine.reset()
        check_free(engine)
        out: Any = engine.generate([list(prompt(20))], max_new_tokens=15)
        assert out[0, 20:].tolist() == best(prompt(20), 15)


def test_no_interrupt_leaves_the_engine_to_one_thread(alarm: None) -> None:
    chooser = random.Random(0)
    refused: list[BaseException] = []

    def elsewhere(engine: Any) -> None:
        try:
            engine.cancel(99_999)
        except SpecStreamError as error:
            refused.append(error)

    with new_engine() as engine:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(0.00005, 0.0005))
                while True:
                    engine.cancel(99_999)
            except KeyboardInterrupt:
                pass
            thread = threading.Thread(target=elsewhere, args=(engine,))
            thread.start()
            thread.join()
    assert not refused


def test_an_interrupted_close_is_finished_by_the_next(alarm: None) -> None:
    chooser = random.Random(0)
    for _ in range(20):
        engine = new_engine(gpu_kv_budget="min", debug=False)
        engine.generate([list(prompt(30))], max_new_tokens=3)
        try:
            signal.setitimer(signal.ITIMER_REAL, chooser.uniform(0.00001, 0.002))
            engine.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            with pytest.raises(EngineClosed):
                engine.submit(prompt(3), max_new_tokens=1)
        engine.close()
        assert not any(worker._thread.is_alive() for worker in cpu_executor(engine)._workers.values())
        assert not engine._host.extents
