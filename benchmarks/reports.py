"""Cost of ``report`` in a training loop, and reports per second at the driver.

The rate alternates with a peer: bare ZeroMQ sockets with CURVE and messages of the same content,
two processes that send and one that decodes. Steps of a model with reports alternate with steps
that write a line of JSON to a file instead, which is the least that outlives a killed process, and
with two series of steps that do neither, which show the noise.

    python benchmarks/reports.py [--rounds 5] [--seconds 4] [--parts call rate steps] [--json PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import report

from horovod_runner import DebugConfig, HorovodRunner

_RANKS = 2
_METRICS = (1, 4)
_BURST = 500  # reports: fewer than fit into the pipe to the task's process
_PAUSE_SECONDS = 0.15  # until the pipe is empty again
_FLOOD = 50_000
_TURNS = 60  # of steps in a round
_TARGET_MICROS, _TARGET_RATE, _TARGET_SLOWER = 10.0, 0.5, 1.01


class Calls(NamedTuple):
    """Microseconds a call: in bursts that fit into the pipe, and in a loop that overruns it."""

    bursts: list[float]
    floods: list[float]


class Rate(NamedTuple):
    """Reports that arrived at the driver, the seconds for that, and dropped reports."""

    arrived: int
    seconds: float
    left_out: int = 0

    @property
    def per_second(self) -> float:
        """Reports that arrived per second."""
        return self.arrived / self.seconds


def time_calls(metrics: int, rounds: int, burst: int, flood: int, pause: float) -> Any:
    """Time calls of ``report`` with a number of metrics; the ranks' ``main``."""
    import time

    from horovod_runner import report

    def once(count: int) -> float:
        start = time.perf_counter()
        if metrics == 1:
            for step in range(count):
                report(loss=0.123, step=step, epoch=1)
        else:
            for step in range(count):
                report(loss=0.123, accuracy=0.456, lr=1e-3, norm=7.8, step=step, epoch=1)
        return (time.perf_counter() - start) / count * 1e6

    once(burst)
    bursts, floods = [], []
    for _ in range(rounds):
        for _ in range(8):
            time.sleep(pause)
            bursts.append(once(burst))
        floods.append(once(flood))
    return bursts, floods


def report_for(seconds: float) -> None:
    """Report as fast as possible; the ranks' ``main``."""
    import time

    from horovod_runner import report

    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for step in range(count, count + 50):
            report(loss=0.123, lr=1e-3, step=step, epoch=1)
        count += 50


def train(turns: int, distributed: bool) -> dict[str, list[float]]:
    """Time ten steps with and without reports, and a call, by turns; the ranks' ``main``."""
    import json
    import os
    import random
    import tempfile
    import time

    import torch

    import horovod_runner

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(512, 768), torch.nn.ReLU(), torch.nn.Linear(768, 768), torch.nn.ReLU()
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    if distributed:
        import horovod.torch as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    x, y = torch.randn(32, 512), torch.randn(32, 768)
    arms = ("none", "none again", "lines", "reports")
    seconds: dict[str, list[float]] = {each: [] for each in (*arms, "call")}

    def ten_steps(arm: str) -> float:
        start = time.perf_counter()
        for step in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            value = loss.item()
            if arm == "lines":
                line = {"loss": value, "lr": 1e-3, "step": step, "epoch": 1, "time": time.time()}
                os.write(lines, f"{json.dumps(line)}\n".encode())
            if arm == "reports":
                before = time.perf_counter()
                horovod_runner.report(loss=value, lr=1e-3, step=step, epoch=1)
                seconds["call"].append(time.perf_counter() - before)
        return time.perf_counter() - start

    with tempfile.TemporaryFile() as file:
        lines = file.fileno()
        for arm in arms:
            ten_steps(arm)
        seconds["call"].clear()
        for turn in range(turns):
            # In a different order each time, the same on all ranks.
            for arm in random.Random(turn).sample(arms, len(arms)):
                seconds[arm].append(ten_steps(arm))
    return seconds


def measure_rate(seconds: float) -> Rate:
    """Count both ranks' reports, from the first that arrived to the last."""
    runner = HorovodRunner(np=-_RANKS, debug_config=DebugConfig(report_ranks="all"), progress=False)
    moments: list[tuple[float, int]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            run = runner.last_run
            count = 0 if run is None else len(run._metrics)
            if count and (not moments or moments[-1][1] != count):
                moments.append((time.monotonic(), count))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        runner.run(report_for, seconds=seconds)
    finally:
        ended.set()
        looking.join()
    assert runner.last_run is not None
    arrived = runner.last_run.metrics.num_rows
    left_out = sum(runner.last_run.dropped_reports.values())
    # The reports of the first reading arrived before it.
    return Rate(arrived - moments[0][1], moments[-1][0] - moments[0][0], left_out)


def send_bare(
    rank: int, seconds: float, address: str, keys: tuple[bytes, bytes, bytes], ready: Any
) -> None:
    """Send one message for each report, and an empty one at the end: a sender of the peer."""
    import msgspec
    import zmq

    server, public, secret = keys
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.curve_serverkey, socket.curve_publickey = server, public
        socket.curve_secretkey = secret
        socket.connect(address)
        encoder = msgspec.msgpack.Encoder()
        ready.wait()
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            for step in range(count, count + 50):
                metrics = {"loss": 0.123, "lr": 1e-3}
                content = ("Report", rank, metrics, step, 1, time.time(), 0)
                socket.send(encoder.encode(content))
            count += 50
        socket.send(b"")


def measure_bare(seconds: float) -> Rate:
    """Run the peer: PUSH and PULL with CURVE. It drops nothing, because the senders wait."""
    import msgspec
    import zmq

    server, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = server, secret
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Barrier(_RANKS)
        address, keys = f"tcp://127.0.0.1:{port}", (server, *zmq.curve_keypair())
        senders = [
            spawn.Process(target=send_bare, args=(rank, seconds, address, keys, ready), daemon=True)
            for rank in range(_RANKS)
        ]
        for sender in senders:
            sender.start()
        decode = msgspec.msgpack.Decoder().decode
        socket.recv()
        arrived, ended, start = 0, 0, time.monotonic()
        while ended < _RANKS:
            data = socket.recv()
            if data:
                decode(data)
                arrived += 1
            else:
                ended += 1
        end = time.monotonic()
        for sender in senders:
            sender.join()
    return Rate(arrived, end - start)


def measure_calls(rounds: int) -> dict[str, Calls]:
    """Microseconds a call, by its number of metrics."""
    found = {}
    for count in _METRICS:
        runner = HorovodRunner(np=-1, progress=False)
        sizes = {"burst": _BURST, "flood": _FLOOD, "pause": _PAUSE_SECONDS}
        title = f"{count} metric{'s' if count > 1 else ''}"
        found[title] = Calls(*runner.run(time_calls, metrics=count, rounds=rounds, **sizes))
    return found


def measure_rates(rounds: int, seconds: float) -> dict[str, list[Rate]]:
    """Our rate and the peer's in turns, after an uncounted first turn."""
    systems: dict[str, Callable[[float], Rate]] = {"ours": measure_rate, "bare": measure_bare}
    found: dict[str, list[Rate]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, measure in systems.items():
            rate = measure(seconds if turn else 1.0)
            print(f"round {turn}  {name}: {rate.per_second:,.0f}/s", file=sys.stderr, flush=True)
            if turn:
                found[name].append(rate)
    return found


def measure_steps(np: int, turns: int) -> dict[str, list[float]]:
    """Rank 0's seconds for ten steps of each kind, and for a call."""
    runner = HorovodRunner(np=np, progress=False, env={"OMP_NUM_THREADS": "1"})
    found: dict[str, list[float]] = runner.run(train, turns=turns, distributed=np != -1)
    return found


def calls_table(calls: dict[str, Calls]) -> str:
    """The table of microseconds a call."""
    rows = []
    for title, found in calls.items():
        verdict = report.at_most(f"report: {title}", median(found.bursts), _TARGET_MICROS, "us")
        rows.append([title, *verdict, f"{min(found.bursts):.2f}", f"{median(found.floods):.2f}"])
    heads = ["microseconds a call", "median", "target", "", "least", "where most are left out"]
    return report.table(heads, rows)


def rates_table(rates: dict[str, list[Rate]]) -> str:
    """The table of reports per second at the driver."""
    ours, bare = (median(each.per_second for each in rates[name]) for name in ("ours", "bare"))
    best = {name: max(each.per_second for each in rates[name]) for name in rates}
    made = [each.left_out / (each.left_out + each.arrived) for each in rates["ours"]]
    verdict = report.at_least("reports a second, ours / bare", ours / bare, _TARGET_RATE)
    rows = [
        ["ours, 2 ranks", f"{ours:,.0f}", "-", ""],
        ["the fastest round", f"{best['ours']:,.0f}", "-", ""],
        ["bare pyzmq with CURVE, a message a report", f"{bare:,.0f}", "-", ""],
        ["the fastest round", f"{best['bare']:,.0f}", "-", ""],
        ["ours / bare", *verdict],
        ["reported, but left out and counted", f"{median(made):.0%}", "-", ""],
    ]
    return report.table(["reports a second at the driver", "median", "target", ""], rows)


def steps_table(steps: dict[str, dict[str, list[float]]]) -> str:
    """The table of steps with a report divided by others: median, and fastest tenth."""
    rows = []
    for title, found in steps.items():
        cells = []
        for parts in (2, 10):
            usual = {name: quantiles(each, n=parts)[0] for name, each in found.items()}
            none, again, with_reports = usual["none"], usual["none again"], usual["reports"]
            against_lines = with_reports / usual["lines"]
            verdict = _judged(title, against_lines) if parts == 2 else []
            cells += [f"{none * 100:.2f}", f"{against_lines:.4f}", *verdict]
            cells += [f"{2 * with_reports / (none + again):.4f}", f"{again / none:.4f}"]
            cells += [f"{usual['call'] * 1e6:.0f}"]
        rows.append([title, *cells])
    heads = ["steps with report / with a line of JSON", "ms", "median", "target", ""]
    more = ["/ with neither", "noise", "call, us"]
    return report.table([*heads, *more, "ms", "fastest tenth", *more], rows)


def _judged(title: str, ratio: float) -> list[str]:
    return report.at_most(
        f"steps with report / with a line of JSON, {title}", ratio, _TARGET_SLOWER
    )[1:]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description="What report costs, and how many arrive.")
    parser.add_argument("--rounds", type=int, default=5, help="of each")
    parser.add_argument("--seconds", type=float, default=4.0, help="of reporting in a round")
    parts = ("call", "rate", "steps")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    raw: dict[str, Any] = {}
    tables = []
    if "call" in options.parts:
        raw["call"] = measure_calls(options.rounds)
        tables.append(calls_table(raw["call"]))
    if "rate" in options.parts:
        raw["rate"] = measure_rates(options.rounds, options.seconds)
        tables.append(rates_table(raw["rate"]))
    if "steps" in options.parts:
        sizes = {"np=-1": -1, f"np=-{_RANKS}, Horovod": -_RANKS}
        raw["steps"] = {
            name: measure_steps(np, _TURNS * options.rounds) for name, np in sizes.items()
        }
        tables.append(steps_table(raw["steps"]))
    print(f"\n{report.machine()}; {options.rounds} rounds\n")
    print("\n\n".join(tables))
    if options.json:
        report.write_json(options.json, raw)


if __name__ == "__main__":
    main()
