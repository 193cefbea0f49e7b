"""The clock of a machine is set by an hour while a training runs on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_runner import (
    HangError,
    HorovodRunner,
    load_checkpoint,
    log_to_driver,
    report,
    save_checkpoint,
)
from tests.conftest import Ranks
from tests.programs import ROOT, Program, await_condition

_HOUR = 3600.0


def compiled(folder: Path) -> str:
    """The library that sets a program's clock. Not libfaketime: it breaks Python's time.sleep."""
    if shutil.which("cc") is None:
        told = "not installed: a C compiler, cc"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    library = folder / "set_clock.so"
    source = Path(__file__).with_name("set_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return str(library)


def set_clock(folder: Path, seconds: float) -> None:
    """Set the clock of all processes whose current folder this is."""
    part = folder / "clock.part"
    part.write_text(f"{seconds:+.0f}\n")
    part.replace(folder / "clock")


def train(folder: str, own: bool) -> tuple[int, list[float]]:
    """Train until a file says stop, and fail once where one says so.

    Args:
        folder: of these files.
        own: whether rank 1 has a clock of its own.

    Returns:
        The last step, and by how many hours the clock of each rank has moved.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    if own and hvd.rank() == 1:
        os.chdir(f"{folder}/own")
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters()
    )
    loaded = load_checkpoint()
    step = first = 0 if loaded is None else loaded.state["step"]
    clock = []
    while True:
        clock.append(time.time() - time.monotonic())
        stop = torch.tensor([int(Path(folder, name).exists()) for name in ("fail", "stop")])
        fails, is_over = hvd.broadcast(stop, 0, name="stop").tolist()
        if fails and not first:
            raise ValueError("after the clock was set")
        loss = model(torch.ones(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            report(loss=loss.item(), step=step)
            log_to_driver(f"step {step}")
            save_checkpoint({"step": step}, step)
        if is_over and step > first + 300:
            moved = torch.tensor([(max(clock) - min(clock)) / _HOUR])
            return step, hvd.allgather(moved, name="moved").tolist()


def resume() -> int:
    """The step of the checkpoint from which a run would resume."""
    loaded = load_checkpoint()
    assert loaded is not None
    return int(loaded.state["step"])


def drive(own: bool) -> None:
    """The driver. The clock is set while its ranks train; what it then knows goes into a file."""
    here = Path.cwd()
    options = {"checkpoint_dir": str(here / "checkpoints")}
    runner = HorovodRunner(np=-2, max_restarts=1, **options)
    handle = runner.start(train, folder=str(here), own=own)

    def until(condition: Callable[[], bool]) -> None:
        await_condition(lambda: condition() or handle.done())

    until(lambda: handle.run is not None)
    run = handle.run
    assert run is not None
    for number, hours in enumerate((0, 1, 0, -1)):
        set_clock(here / "own" if own else here, hours * _HOUR)
        if number == 2:
            (here / "fail").touch()
            until(lambda: len(run.attempts) == 2)
        before = [len(run.profile.rows.get(rank, [])) for rank in range(2)]
        until(
            lambda: all(len(run.profile.rows.get(n, [])) > before[n] + 1 for n in range(2))  # noqa: B023
        )
    (here / "stop").touch()
    steps, moved = handle.result(100)
    page = Path(run.report(here / "run.html")).read_text(encoding="utf-8")
    profile = run.profile
    measured = [*profile.rows.values(), *profile.machines.values()]
    told = {
        "steps": steps,
        "moved": moved,
        "missing": run.trace(here / "trace.json"),
        "trace": [
            each.get("ts", 0)
            for each in json.loads((here / "trace.json").read_text())["traceEvents"]
        ],
        "timings": [
            run.timings.queued,
            run.timings.launched,
            run.timings.first_line,
            run.timings.first_report,
            run.attempts[0].ended,
            run.attempts[1].started,
            run.timings.end,
        ],
        "errors": [each.error for each in run.attempts],
        "pause": run.attempts[1].pause,
        "resumed": run.attempts[1].resumed_from,
        "lines": [line.time for line in run.logs],
        "texts": [line.text for line in run.logs],
        "measured": [[row.time for row in rows] for rows in measured],  # type: ignore[attr-defined]
        "seconds": [row.seconds for rows in measured for row in rows],  # type: ignore[attr-defined]
        "lateness": [each.lateness for each in profile.totals.values()],
        "reports": [each.timestamp() for each in run.metrics["time"].to_pylist()],
        "saved": [[each.step, each.saved_at] for each in run.checkpoints],
        "duration": "".join(re.findall(r"<dt>duration</dt><dd>(.*?)</dd>", page)),
        "diagnosis": str(run.diagnose()),
        "latest": HorovodRunner(np=-1, resume=True, **options).run(resume),
    }
    Path("told").write_text(json.dumps(told))


# Slow: a rank sends a summary a second, and the ranks start twice.
@pytest.mark.horovod
@pytest.mark.parametrize("own", [False, True], ids=["of_all", "of_one_rank"])
def test_a_clock_that_is_set_while_a_run_lasts_harms_nothing(own: bool, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "own"):
        folder.mkdir(exist_ok=True)
        set_clock(folder, 0)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": compiled(tmp_path),
    }
    script = f"from tests.contract.test_clocks import drive\ndrive({own})"
    program = [sys.executable, "-c", script]
    with Program(program, cwd=tmp_path, env=environment) as driver:
        assert driver.wait(300) == 0
    told = json.loads((tmp_path / "told").read_text())
    assert told["moved"] == pytest.approx([0.0 if own else 1.0, 1.0], abs=0.1)
    assert told["missing"] == []
    assert told["errors"] == ["ValueError: after the clock was set", ""]
    assert not re.search("no progress|lost|silent|stopped", "\n".join(told["texts"]))

    saved = [step for step, _ in told["saved"]]
    assert saved == sorted(saved)
    assert told["resumed"] in range(100, told["steps"], 100)
    assert told["latest"] == saved[-1] == told["steps"] // 100 * 100

    moments = [told["timings"], told["lines"], told["reports"], *told["measured"]]
    moments.append([moment for _, moment in told["saved"]])
    for each in moments:
        assert each == sorted(each)
        assert each[-1] - each[0] < _HOUR / 2
    assert min(told["seconds"]) >= 0
    assert 0 < told["pause"] < _HOUR / 2
    assert max(told["lateness"]) < _HOUR / 2
    assert max(told["trace"]) < 1e6 * _HOUR / 2
    assert " h" not in told["duration"]


@pytest.mark.horovod
@pytest.mark.cold
@pytest.mark.places("local")
def test_a_hang_is_told_whose_clock_was_set_back(ranks: Ranks, tmp_path: Path) -> None:
    set_clock(tmp_path, _HOUR)

    def main() -> None:
        import torch
        import torch.distributed as dist

        os.chdir(tmp_path)
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 0:
            Path("entered").touch()
            dist.all_reduce(torch.ones(5))
        while not Path("entered").exists():
            time.sleep(0.1)
        time.sleep(1)  # rank 0 is likely to wait by now; the test passes in any case
        set_clock(tmp_path, 0)
        threading.Event().wait()

    options = {"hang_timeout": 4.0, "env": {"LD_PRELOAD": compiled(tmp_path)}}
    with pytest.raises(HangError, match=r"rank 0 waits in all_reduce number \d+ of shape \[5\]"):
        ranks.run(2, main, options)
