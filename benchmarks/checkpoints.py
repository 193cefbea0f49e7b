"""Cost of a checkpoint: time that it stalls the training, rate to the driver, memory.

Each alternates with a peer in the same run: the stall with a plain ``torch.save`` of the same state
to the same disk and with one copy in memory, the rate with two bare ZeroMQ sockets that encrypt
too, and with a copy of the same file. Each row says whether both sides wait for the disk (fsync).

    python benchmarks/checkpoints.py [--rounds 5] [--mb 500] [--large-mb 2000] [--json PATH]

With ``--commits`` it measures ``commit`` alone, beside one copy in memory and ``save_checkpoint``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import report
import zmq

from horovod_runner import CheckpointConfig, HorovodRunner
from horovod_runner.sinks import Sink

_TARGET_STALL, _TARGET_STREAM = 1 / 3, 0.5
_TARGET_COMMIT = 1.3
_TARGET_MEMORY = 2.02  # times the state: itself, a copy, and buffers
_MB = 1_000_000


class Streamed(NamedTuple):
    """A checkpoint sent to the driver: seconds, bytes, and the seconds of bare sockets."""

    seconds: float
    size: int
    driver_growth: int
    worker_growth: int
    bare: float


class Events(Sink):
    """Records when checkpoints were complete on the driver."""

    def __init__(self) -> None:
        self.complete: list[float] = []

    def checkpoint(self, checkpoint: Any) -> None:
        """Record the time; see Sink."""
        self.complete.append(time.time())


def save_in_turn(folder: str, mb: int, rounds: int) -> dict[str, list[float]]:
    """Save the same state in each way; the ranks' ``main``. Returns the seconds of each way."""
    import os
    import time

    import torch

    from horovod_runner import save_checkpoint
    from horovod_runner.worker import context

    state = {f"tensor {i}": torch.randn(mb * 250_000 // 20) for i in range(20)}
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    path = os.path.join(folder, "plain.pt")
    seconds: dict[str, list[float]] = {
        name: [] for name in ("ours", "written", "torch.save", "with fsync", "copy")
    }

    def ours() -> None:
        start = time.perf_counter()
        save_checkpoint({"model": state}, turn)
        seconds["ours"].append(time.perf_counter() - start)
        rank = context.current()
        assert rank is not None
        assert rank.saver is not None
        rank.saver.finish()
        seconds["written"].append(time.perf_counter() - start)

    def plain() -> None:
        start = time.perf_counter()
        torch.save({"model": state}, path)
        seconds["torch.save"].append(time.perf_counter() - start)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        seconds["with fsync"].append(time.perf_counter() - start)
        os.unlink(path)

    def in_memory() -> None:
        start = time.perf_counter()
        for name, tensor in state.items():
            copy[name].copy_(tensor)
        seconds["copy"].append(time.perf_counter() - start)

    for turn in range(rounds + 1):
        for way in (ours, plain, in_memory) if turn % 2 else (plain, in_memory, ours):
            os.sync()  # no turn waits for the other turns' writes
            way()
    return seconds


def commit_in_turn(folder: str, mb: int, rounds: int) -> dict[str, list[float]]:
    """Keep the same state in each way; the ranks' ``main``. Returns the seconds of each way."""
    import os
    import time

    import torch

    from horovod_runner import commit, save_checkpoint
    from horovod_runner.worker import context

    rank = context.current()
    assert rank is not None
    rank.commits = folder  # as in an elastic run
    state = {f"tensor {i}": torch.randn(mb * 250_000 // 20) for i in range(20)}
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def in_memory() -> None:
        for name, tensor in state.items():
            copy[name].copy_(tensor)

    ways: dict[str, Callable[[], None]] = {
        "commit": lambda: commit({"model": state}, turn),
        "copy": in_memory,
        "save_checkpoint": lambda: save_checkpoint({"model": state}, turn),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):  # the first two commits allocate memory
        for name in sorted(ways, reverse=turn % 2 == 1):
            if rank.saver is not None:  # no turn waits for the other turns' writes
                rank.saver.finish()
            os.sync()
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def save_far_away(mb: int, steps: int, far: bool) -> tuple[list[float], int]:
    """Save as on a host that does not see the driver's folder; the ranks' ``main``.

    Returns:
        Times just before the first piece of each checkpoint was sent; this process's maximum
        growth in bytes.
    """
    import time

    import torch

    from horovod_runner import save_checkpoint
    from horovod_runner.checkpoints import checkpoint, saver
    from horovod_runner.worker import context

    def resident(name: str) -> int:
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(name))
        return int(line.split()[1]) * 1024

    if far:
        checkpoint.has_probe = lambda folder, token: False
    begun: list[float] = []
    send = saver.Saver._stream

    def noted(self: Any, *arguments: Any) -> None:
        begun.append(time.time())
        send(self, *arguments)

    saver.Saver._stream = noted  # type: ignore[method-assign]
    save_checkpoint({"model": torch.zeros(1)}, 0)  # one-time allocations do not count
    rank = context.current()
    assert rank is not None
    assert rank.saver is not None
    rank.saver.finish()
    begun.clear()
    before = resident("VmRSS")
    state = {f"tensor {i}": torch.zeros(mb * 250_000 // 20) for i in range(20)}
    for number in range(1, 1 + steps):
        for tensor in state.values():
            tensor.add_(1)
        save_checkpoint({"model": state}, number)
    rank.saver.finish()
    return begun, resident("VmHWM") - before


@contextmanager
def own_peak() -> Iterator[list[int]]:
    """Yield a list, to which this process's maximum growth in the block is added, in bytes."""
    growth: list[int] = []
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    yield growth
    growth.append(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def runner_that_saves(folder: str) -> HorovodRunner:
    """A runner of one rank that keeps its latest checkpoint in a folder."""
    return HorovodRunner(
        np=-1,
        progress=False,
        checkpoint_dir=folder,
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )


def measure_waits(mb: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way to save, in the order of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        runner = runner_that_saves(folder)
        found: dict[str, list[float]] = runner.run(
            save_in_turn, folder=folder, mb=mb, rounds=rounds
        )
    return found


def measure_commits(mb: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way to keep a state, in the order of the rounds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        runner = runner_that_saves(folder)
        found: dict[str, list[float]] = runner.run(
            commit_in_turn, folder=memory, mb=mb, rounds=rounds
        )
    return found


def measure_stream(mb: int, sync: bool) -> tuple[Streamed, list[float]]:
    """Time checkpoints to the driver, and plain copies of the same file."""
    unsynced = nullcontext() if sync else mock.patch("os.fsync")
    with tempfile.TemporaryDirectory() as folder, unsynced:
        events = Events()
        runner = HorovodRunner(np=-1, progress=False, checkpoint_dir=folder, sinks=[events])
        with own_peak() as growth:
            begun, worker = runner.run(save_far_away, mb=mb, steps=1, far=True)
        assert runner.last_run is not None
        latest = runner.last_run.latest_checkpoint
        if latest is None or latest.step != 1:
            raise RuntimeError("the checkpoint did not reach the driver")
        path = Path(latest.path)
        copies = [_copy(path, path.with_suffix(".copy"), sync) for _ in range(2)]
        bare = _send_bare(path, path.with_suffix(".copy"), sync)
        seconds = events.complete[-1] - begun[0]
        return Streamed(seconds, path.stat().st_size, growth[0], worker, bare), copies


def _copy(source: Path, target: Path, sync: bool) -> float:
    os.sync()
    start = time.perf_counter()
    shutil.copyfile(source, target)
    if sync:
        with target.open("rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def _push(path: Path, address: str, keys: tuple[bytes, bytes, bytes]) -> None:
    """Receive, in the other process of :func:`_send_bare`, until an empty message."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket, path.open("rb") as file:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
        socket.sndhwm = 16
        socket.connect(address)
        while data := file.read(1 << 20):
            socket.send(data)
        socket.send(b"")


def _send_bare(source: Path, target: Path, sync: bool) -> float:
    """Seconds to send a file to another process over bare ZeroMQ sockets with CURVE."""
    server, secret = zmq.curve_keypair()
    spawn = multiprocessing.get_context("spawn")
    with zmq.Context() as context, context.socket(zmq.PULL) as socket, target.open("wb") as file:
        socket.curve_server, socket.rcvhwm = True, 16
        socket.curve_publickey, socket.curve_secretkey = server, secret
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        arguments = (source, f"tcp://127.0.0.1:{port}", (server, *zmq.curve_keypair()))
        sender = spawn.Process(target=_push, args=arguments, daemon=True)
        sender.start()
        data, start = socket.recv(), time.perf_counter()  # the other process has started
        while data:
            file.write(data)
            data = socket.recv()
        if sync:
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        sender.join()
    target.unlink()
    return seconds


def measure_memory(mb: int, far: bool) -> int:
    """Rank 0's maximum growth in bytes while it saves three times."""
    runner = HorovodRunner(np=-1, progress=False, checkpoint_config=CheckpointConfig(num_to_keep=1))
    _, growth = runner.run(save_far_away, mb=mb, steps=3, far=far)
    return int(growth)


def waits_table(waits: dict[str, list[float]], mb: int) -> str:
    """The table of how long the training waits."""
    usual = {name: median(seconds[1:]) for name, seconds in waits.items()}
    rows = [
        [title, f"{usual[name] * 1e3:.0f}", f"{waits[name][0] * 1e3:.0f}"]
        for title, name in (
            ("save_checkpoint", "ours"),
            ("torch.save", "torch.save"),
            ("torch.save and fsync", "with fsync"),
            ("a copy in memory", "copy"),
            ("from save_checkpoint until it counts: fsync, SHA-256", "written"),
        )
    ]
    heads = [f"milliseconds, {mb} MB", "median", "the first"]
    ratio = usual["ours"] / usual["torch.save"]
    stall = "save_checkpoint / torch.save"
    against_copy = f"{usual['ours'] / usual['copy']:.2f}"
    ratios = [
        [stall, *report.at_most(f"{stall}, {mb} MB", ratio, round(_TARGET_STALL, 3))],
        ["save_checkpoint / a copy in memory", against_copy, "-", ""],
    ]
    table = report.table(heads, rows)
    return f"{table}\n\n{report.table(['ratio', 'measured', 'target', ''], ratios)}"


def commits_table(found: dict[str, list[float]], mb: int) -> str:
    """The table of what a commit costs."""
    usual = {name: median(seconds[2:]) for name, seconds in found.items()}
    titles = {"commit": "commit", "copy": "a copy in memory", "save_checkpoint": "save_checkpoint"}
    rows = [
        [titles[name], f"{usual[name] * 1e3:.0f}", f"{found[name][0] * 1e3:.0f}"] for name in titles
    ]
    against = "commit / a copy in memory"
    ratio = usual["commit"] / usual["copy"]
    stall = f"{usual['commit'] / usual['save_checkpoint']:.2f}"
    ratios = [
        [against, *report.at_most(f"{against}, {mb} MB", ratio, _TARGET_COMMIT)],
        ["commit / the stall of save_checkpoint", stall, "-", ""],
    ]
    table = report.table([f"milliseconds, {mb} MB", "median", "the first"], rows)
    return f"{table}\n\n{report.table(['ratio', 'measured', 'target', ''], ratios)}"


def streams_table(streams: dict[str, list[tuple[Streamed, list[float]]]]) -> str:
    """The table of how fast a checkpoint reaches the driver."""
    rows = []
    for title, found in streams.items():
        ours = [streamed.size / streamed.seconds / _MB for streamed, _ in found]
        copies = [each.size / seconds / _MB for each, both in found for seconds in both]
        bare = [each.size / each.bare / _MB for each, _ in found]
        ratio, best = median(ours) / median(bare), max(ours) / max(bare)
        what = f"checkpoint to the driver / bare CURVE, {title}"
        verdict = report.at_least(what, ratio, _TARGET_STREAM)[1:]
        speeds = [f"{median(each):.0f}" for each in (ours, bare, copies)]
        rows.append([title, *speeds, f"{ratio:.2f}", *verdict, f"{best:.2f}"])
    heads = ["MB a second", "to the driver", "bare CURVE", "copyfile", "ours / bare", "target", ""]
    heads.append("fastest rounds")
    return report.table(heads, rows)


def memory_table(
    memory: dict[str, int], streams: dict[str, list[tuple[Streamed, list[float]]]], mb: int
) -> str:
    """The table of each process's maximum growth."""
    rows = []
    for name, growth in memory.items():
        what = f"rank 0's growth / the state, {name}"
        verdict = report.at_most(what, growth / _MB / mb, _TARGET_MEMORY)
        rows.append([f"rank 0, {name}", f"{growth / _MB:.0f}", *verdict])
    for name, found in streams.items():
        driver = max(each.driver_growth for each, _ in found)
        above = max(each.worker_growth - 2 * each.size for each, _ in found)
        rows.append([f"driver and watch, {name}", f"{driver / _MB:.0f}", "-", "-", ""])
        rows.append([f"rank 0 above twice the state, {name}", f"{above / _MB:.0f}", "-", "-", ""])
    return report.table(["MB at the peak", "growth", "of the state", "target", ""], rows)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--large-mb", type=int, default=2000)
    parser.add_argument("--commits", action="store_true", help="measure commit alone")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    mb, large = options.mb, options.large_mb
    if options.commits:
        commits = measure_commits(mb, options.rounds)
        print(f"\n{report.machine()}; medians of {options.rounds} rounds\n")
        print(commits_table(commits, mb))
        if options.json:
            report.write_json(options.json, {"commits": commits})
        return
    waits = measure_waits(mb, options.rounds)
    print(waits_table(waits, mb), file=sys.stderr, flush=True)
    names = {f"{mb} MB, neither waits for the disk": False, f"{mb} MB, fsync on both sides": True}
    streams: dict[str, list[tuple[Streamed, list[float]]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, sync in names.items():
            streams[name].append(measure_stream(mb, sync))
    streams[f"{large} MB, fsync on both sides"] = [measure_stream(large, True)]
    memory = {
        f"{mb} MB to a folder": measure_memory(mb, far=False),
        f"{mb} MB to the driver": measure_memory(mb, far=True),
    }
    print(f"\n{report.machine()}; medians of {options.rounds} rounds\n")
    tables = [waits_table(waits, mb), streams_table(streams), memory_table(memory, streams, mb)]
    print("\n\n".join(tables))
    if options.json:
        raw = {"waits": waits, "streams": streams, "memory": memory}
        report.write_json(options.json, raw)


if __name__ == "__main__":
    main()
