"""Looks at the main thread's lines: what they stand for, and how many there are."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.worker.profiling.loader import LoaderWatch
from horovod_runner.worker.profiling.sampler import Pace, Sampler
from tests.stand_ins import SetClock


def look(sampler: Sampler) -> None:
    """Look from another thread, as in a rank, while this one waits in the last line."""
    main, looked = threading.get_ident(), threading.Lock()
    waits_in = max(line for *_, line in look.__code__.co_lines() if line)

    def run() -> None:
        frame = sys._current_frames()[main]
        while (frame.f_code, frame.f_lineno) != (look.__code__, waits_in):
            time.sleep(0.001)
            frame = sys._current_frames()[main]
        del frame
        sampler.look()
        looked.release()

    looked.acquire()
    threading.Thread(target=run).start()
    looked.acquire()


def test_calls_around_the_training_are_left_out() -> None:
    sampler = Sampler(sys._getframe().f_code)
    look(sampler)
    (stack,) = sampler.stacks()
    assert (stack[0][0], stack[0][1]) == (__file__, "look")


def test_a_look_stands_for_the_time_since_the_last_one() -> None:
    clock = SetClock()
    sampler = Sampler(clock=clock)

    def here() -> None:
        look(sampler)

    def there() -> None:
        look(sampler)

    for seconds, main in [(0.02, here), (0.1, there), (0.02, here)]:
        clock.now += seconds
        main()
    names = {
        us: {function.rpartition(".")[2] for _, function, _ in stack}
        for stack, us in sampler.stacks().items()
    }
    assert names.keys() == {40_000, 100_000}
    assert "here" in names[40_000]
    assert "there" in names[100_000]
    assert sampler.total == 140_000


def test_the_same_line_called_from_elsewhere_is_another_stack() -> None:
    sampler = Sampler()
    look(sampler)
    look(sampler)
    assert len(sampler.stacks()) == 2


def test_no_frame_outlives_a_look() -> None:
    sampler = Sampler()
    gone: list[bool] = []

    class Local:
        def __del__(self) -> None:
            gone.append(True)

    def train() -> None:
        _batch = Local()
        look(sampler)

    train()
    assert gone == [True]


def settled(look_cpu: float, rest_cpu: float = 0.0) -> float:
    """The seconds between two looks, where a look costs this CPU time, and a second the rest."""
    clock, computed = SetClock(), SetClock()
    pace = Pace(clock, computed)
    for _ in range(5):
        clock.now += 1.0
        computed.now += look_cpu / pace.seconds + rest_cpu
        pace.adjust()
    return pace.seconds


def test_expensive_looks_are_fewer_until_the_thread_takes_three_thousandths() -> None:
    assert 150e-6 / settled(150e-6, 300e-6) + 300e-6 == pytest.approx(0.003, rel=0.01)


@pytest.mark.parametrize(("look_cpu", "seconds"), [(10e-6, 0.02), (5e-3, 0.1)])
def test_there_are_ten_to_fifty_looks_a_second(look_cpu: float, seconds: float) -> None:
    assert settled(look_cpu) == seconds


def process_of_dataloader(watch: LoaderWatch, loop: Callable[[], object]) -> Callable[[], None]:
    """What a DataLoader process of a watched torch runs, in place of torch's own loop."""
    worker: Any = SimpleNamespace(_worker_loop=loop)
    module = SimpleNamespace(
        DataLoader=type("DataLoader", (), {"__iter__": None}),
        _BaseDataLoaderIter=type("_BaseDataLoaderIter", (), {"__next__": None}),
        _utils=SimpleNamespace(worker=worker),
    )
    watch.watch(module)
    looking: Callable[[], None] = worker._worker_loop
    return looking


def test_a_process_of_a_dataloader_hands_over_each_look_once() -> None:
    now = 0.0
    much_later = threading.Event()

    def monotonic() -> float:
        """Let five seconds pass between two looks, and say when there were some writes."""
        nonlocal now
        now += 5.0
        if now >= 80.0:
            much_later.set()
        return now

    watch = LoaderWatch(monotonic)
    loop = process_of_dataloader(watch, much_later.wait)
    watch.begin()
    loop()
    watch.read()
    assert 20e6 < watch.total <= now * 1e6
    assert sum(watch.stacks.values()) == watch.total


def test_a_process_of_a_dataloader_does_not_look_where_nobody_reads() -> None:
    threads: list[str] = []
    loop = process_of_dataloader(
        LoaderWatch(), lambda: threads.extend(each.name for each in threading.enumerate())
    )
    loop()
    assert threads
    assert not [name for name in threads if "lines" in name]
