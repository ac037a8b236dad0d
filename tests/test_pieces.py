"""Work in pieces: it may be left anywhere, and comes to the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specstream.pieces import Pieces, Unfinished, finish, in_larger_pieces, timed


def counted(count: int, done: list[int]) -> Pieces[str]:
    for number in range(count):
        done.append(number)
        yield
    return "the end"


@pytest.mark.parametrize("count", [0, 1, 5])
def test_all_at_once(count: int) -> None:
    done = list[int]()
    assert finish(counted(count, done)) == "the end"
    assert done == list(range(count))


@pytest.mark.parametrize(
    ("count", "size", "pieces"), [(0, 3, 0), (2, 3, 0), (3, 3, 1), (4, 3, 1), (9, 3, 3), (2, 1, 2)]
)
def test_larger_pieces(count: int, size: int, pieces: int) -> None:
    done = list[int]()
    assert len(list(in_larger_pieces(counted(count, done), size))) == pieces
    assert done == list(range(count))
    assert finish(in_larger_pieces(counted(count, []), size)) == "the end"


def test_what_is_done_in_between_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work() -> Pieces[str]:
        for _ in range(3):
            now[0] += 2
            yield
        now[0] += 1
        return "the end"

    def with_pauses() -> Pieces[tuple[str, float]]:
        timing = timed(work())
        while True:
            try:
                next(timing)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            now[0] += 100
            yield

    assert finish(with_pauses()) == ("the end", 7.0)


def test_what_is_left_goes_on_unless_other_work_was_begun() -> None:
    unfinished, done = Unfinished(), list[int]()

    def begin() -> Iterator[None]:
        return counted(4, done)

    for _ in zip(range(2), unfinished.pieces("a", begin), strict=False):
        pass
    assert done == [0, 1]
    assert len(list(unfinished.pieces("a", begin))) == 2
    assert done == [0, 1, 2, 3]
    assert len(list(unfinished.pieces("a", begin))) == 4, "anew: it was done"
    assert next(unfinished.pieces("a", begin), "done") is None
    assert next(unfinished.pieces("b", begin), "done") is None
    del done[:]
    assert len(list(unfinished.pieces("a", begin))) == 4


def test_what_fails_is_begun_anew() -> None:
    unfinished, attempts = Unfinished(), list[int]()

    def failing() -> Iterator[None]:
        attempts.append(0)
        yield
        if len(attempts) == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(unfinished.pieces("a", failing))
    assert len(list(unfinished.pieces("a", failing))) == 1
    assert len(attempts) == 2
