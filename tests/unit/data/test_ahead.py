"""Prefetching: results in order, a bounded number of them, and no reference cycles."""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from horovod_runner.data.feed.ahead import Ahead
from tests.programs import run_python


def test_prefetching_is_bounded() -> None:
    drawn: list[int] = []
    drawing = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            drawing.release()
            yield number

    ahead = Ahead(items(), lambda number: -number, ahead=3)
    for _ in range(3):
        drawing.acquire(timeout=30)
    assert len(drawn) == 3
    assert next(ahead) == 0
    drawing.acquire(timeout=30)
    assert len(drawn) == 4
    ahead.close()
    ahead.close()


@pytest.mark.parametrize("is_helped", [False, True])
def test_results_come_in_the_order_of_items(is_helped: bool) -> None:
    with Ahead(iter(range(500)), str, ahead=3, is_helped=is_helped) as ahead:
        assert list(ahead) == [str(number) for number in range(500)]
        assert list(ahead) == []


def test_only_one_thread_at_a_time_draws_an_item() -> None:
    def items() -> Iterator[int]:  # a generator raises ValueError if two threads run it
        for number in range(64):
            hashlib.sha256(bytes(1 << 20))  # gives another thread time to interfere
            yield number

    with Ahead(items(), str, ahead=3, is_helped=True) as ahead:
        assert list(ahead) == [str(number) for number in range(64)]


def test_a_waiting_thread_computes_a_later_item() -> None:
    later = threading.Event()
    workers = {}

    def work(number: int) -> int:
        workers[number] = threading.current_thread()
        if number == 1:
            later.set()
        assert number or later.wait(30)  # the first result waits for the second
        return number

    with Ahead(iter(range(2)), work, ahead=1, is_helped=True) as ahead:
        assert list(ahead) == [0, 1]
    assert threading.current_thread() in workers.values()


@pytest.mark.parametrize("is_helped", [False, True])
@pytest.mark.parametrize("where", ["items", "work"])
def test_an_error_is_raised_in_order(where: str, is_helped: bool) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        if where == "items":
            raise ValueError(5)
        yield from range(5, 9)

    def work(number: int) -> int:
        if number == 5:
            raise ValueError(number)
        return number

    results: list[int] = []
    with Ahead(items(), work, ahead=2, is_helped=is_helped) as ahead:
        with pytest.raises(ValueError, match="5"):
            results.extend(ahead)
        assert next(ahead, None) is None
    assert results == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_helped", [False, True])
@pytest.mark.parametrize("taken", [2, 10])
def test_no_reference_cycle_is_left(taken: int, is_helped: bool) -> None:
    class Work:
        def __call__(self, number: int) -> int:
            return number

    work = Work()
    gone = weakref.ref(work)
    gc.disable()
    try:
        with Ahead(iter(range(5)), work, ahead=2, is_helped=is_helped) as ahead:
            for _ in range(taken):
                next(ahead, None)
        del ahead, work
        assert gone() is None
    finally:
        gc.enable()


def loop(work: Callable[[int], int]) -> Iterator[int]:
    with Ahead(count(), work, ahead=2) as ahead:
        yield from ahead


def test_python_exits_while_a_global_keeps_a_loop() -> None:
    program = "from tests.unit.data.test_ahead import loop; kept = loop(abs); print(next(kept))"
    done = run_python(program, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_may_be_collected_by_its_own_thread() -> None:
    lost, collected = threading.Event(), threading.Event()

    def work(number: int) -> int:
        if number and lost.wait(30) and not collected.is_set():
            gc.collect()
            collected.set()
        return number

    cycle: list[object] = [loop(work)]
    cycle.append(cycle)
    assert next(cycle[0]) == 0  # type: ignore[call-overload]
    gc.disable()
    try:
        del cycle
        lost.set()
        assert collected.wait(30)
    finally:
        gc.enable()
