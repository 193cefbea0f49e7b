"""Runs that hang: who waits for whom is named, the stacks are shown, and the run ends."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from horovod_runner import HangError, RankFailedError, log_to_driver
from tests.conftest import Ranks
from tests.contract.test_end import Calling, in_thread

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
hangs = {"hang_timeout": 4.0}


def reduce_for_ever() -> None:
    import horovod.torch as hvd
    import torch

    while True:
        hvd.allreduce(torch.ones(3), name="gradient")


def hang_in_python() -> None:
    while True:
        pass


def hang_in_native_code() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # keeps the interpreter's lock for years


def hang_in_a_lock() -> None:
    lock = threading.Lock()
    with lock, lock:
        pass


@pytest.mark.horovod
def test_a_rank_that_the_others_wait_for_is_named_with_its_stack(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    check_hang(ranks, hang_in_python, capsys)


@pytest.mark.horovod
@pytest.mark.places("local")
@pytest.mark.parametrize("hang", [hang_in_native_code, hang_in_a_lock])
def test_a_rank_is_named_whatever_it_hangs_in(
    ranks: Ranks, hang: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    check_hang(ranks, hang, capsys)


def check_hang(ranks: Ranks, hang: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    name = hang.__name__

    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for _ in range(10):
            hvd.allreduce(torch.ones(3), name="gradient")
        if hvd.rank() == 1:
            hang()
        reduce_for_ever()

    with pytest.raises(HangError) as caught:
        ranks.run(2, main, hangs)
    told = str(caught.value)
    # Where native code keeps Horovod's own thread from the interpreter, nobody knows the tensor.
    assert re.search("rank 0 waits in (allreduce.gradient|a collective) for rank 1", told)
    stacks = dict(re.findall(r"Stack of rank (\d):\n((?:  \|.*\n?)+)", told))
    assert "in reduce_for_ever" in stacks["0"]
    assert f"in {name}" in stacks["1"]
    assert "horovod_runner/worker/main.py" not in told
    warned = capsys.readouterr().err
    assert "no progress for" in warned
    assert re.search(rf"rank 1: test_hang.py:\d+ in {name}", warned)


@pytest.mark.horovod
@pytest.mark.places("local")
def test_a_hang_that_stops_horovods_own_thread_is_told_too(ranks: Ranks) -> None:
    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(3), name="first")
        hvd.allreduce_async(torch.ones(3), name="last")
        if hvd.rank() == 1:
            hang_in_native_code()
        reduce_for_ever()

    with pytest.raises(HangError, match=r"rank 0 waits .* rank 1\."):
        ranks.run(2, main, hangs)


@pytest.mark.horovod
@pytest.mark.places("local")
def test_ranks_that_call_different_collectives_are_named_both(ranks: Ranks) -> None:
    def main() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(3), name=f"tensor{hvd.rank()}")

    with pytest.raises(HangError) as caught:
        ranks.run(2, main, hangs)
    assert "rank 0 waits in allreduce.tensor0 for rank 1" in str(caught.value)
    assert "rank 1 waits in allreduce.tensor1 for rank 0" in str(caught.value)
    assert "the same collectives" in str(caught.value)


def wait_in_backward(rank: int) -> None:
    """Rank 0 waits in native code, inside the backward pass of DistributedDataParallel."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    for step in range(10):
        if rank == 1 and step == 5:
            hang_in_python()
        model(torch.ones(2, 3)).sum().backward()


def call_different_collectives(rank: int) -> None:
    import torch
    import torch.distributed as dist

    pair = dist.new_group([0, 1], group_desc="pair")
    dist.all_reduce(torch.ones(3), group=pair)
    if rank == 0:
        dist.all_reduce(torch.ones(5), group=pair)
    dist.broadcast(torch.ones(5), 0)


# Slow: a hang is one only after some seconds.
@pytest.mark.horovod
@pytest.mark.places("local")
@pytest.mark.parametrize(
    ("hang", "expected"),
    [
        (wait_in_backward, [r"rank 0 waits in all_reduce number \d+ of shape \[4\] for rank 1"]),
        (
            call_different_collectives,
            [
                r"rank 0 waits in all_reduce number 2 of shape \[5\] of the group pair \(ranks "
                r"0-1\) for rank 1",
                r"rank 1 waits in broadcast number \d+ for rank 0",
            ],
        ),
    ],
)
def test_the_collective_of_torch_distributed_is_named(
    ranks: Ranks, hang: Callable[[int], None], expected: list[str]
) -> None:
    def main() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        hang(dist.get_rank())

    with pytest.raises(HangError) as caught:
        ranks.run(2, main, hangs)
    for text in expected:
        assert re.search(text, str(caught.value)), caught.value
    assert f"in {hang.__name__}" in str(caught.value)


@pytest.mark.horovod
@pytest.mark.places("local")
def test_a_rank_that_returns_early_is_named_as_the_cause(ranks: Ranks) -> None:
    def main() -> None:
        import horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            reduce_for_ever()

    with pytest.raises(RankFailedError, match=r"rank 1 returned .*rank 0 "):
        ranks.run(2, main)


def test_idle_ranks_are_ended_with_their_stacks(ranks: Ranks) -> None:
    def main() -> None:
        subprocess.run(["sleep", "1000"], check=True)

    with pytest.raises(HangError, match=r"no rank .*hang_timeout") as caught:
        ranks.run(1, main, hangs)
    assert "Stack of rank 0" in str(caught.value)
    assert "subprocess.py" in str(caught.value)


@pytest.mark.places("local")
def test_ranks_that_compute_print_or_let_others_compute_do_not_hang(ranks: Ranks) -> None:
    def main() -> str:
        end = time.monotonic() + 8
        rank = os.environ["RANK"]
        if rank == "0":
            while time.monotonic() < end:
                log_to_driver("still here")
                time.sleep(0.5)
        elif rank == "1":
            while time.monotonic() < end:
                pass
        else:
            code = f"import time\nwhile time.monotonic() < {end}: pass"
            subprocess.run([sys.executable, "-c", code], check=True)
        return "done"

    assert ranks.run(3, main, {"hang_timeout": 2.0}) == "done"


def test_stacks_are_shown_on_request_and_the_run_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    runner, seen = ranks.runner(2), tmp_path / "seen"
    os.mkfifo(seen)

    def main() -> int:
        log_to_driver("up")
        with seen.open("rb"):  # until somebody opens it to write
            return 7

    ask = partial(in_thread, runner.dump_stacks)
    shown = Calling("Stack of", 1, lambda: seen.open("wb").close())
    with (
        contextlib.redirect_stdout(Calling("up", 2, ask)),
        contextlib.redirect_stderr(shown),
    ):
        assert runner.run(main) == 7
    told = shown.getvalue()
    assert re.search(r"Stack of ranks 0-1:|Stack of rank 0:[^$]*Stack of rank 1:", told)
    assert re.search(r'test_hang.py", line \d+ in main', told)
