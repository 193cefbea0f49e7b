"""How long ``hvd.init()`` takes when the ranks meet at our store, and at Horovod's own.

All ranks are on this machine and talk over the loopback interface. They are forks of one process
that has imported horovod.torch, so that what is timed is the meeting and not the imports. The two
stores take turns, so that a machine that slows down for a while slows both.

    python benchmarks/rendezvous.py [--sizes 2,8,16,32] [--rounds 3] [--json rendezvous.json]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import horovod.torch as hvd
import report

from horovod_runner.environment import worker_variables
from horovod_runner.messages import Assignment
from horovod_runner.rendezvous import Rendezvous
from horovod_runner.topology import Offer, Slot, assign

_ADDRESS = "127.0.0.1"
_INTERFACE = "lo"
_HOST = "benchmark"
_LIMIT_SECONDS = 300.0  # for any one step of all ranks
_ONE_ROUND_FROM = 32  # Horovod's own store takes most of a minute there
_TARGET, _TARGET_FROM = 8, 16


@contextmanager
def our_store(size: int) -> Iterator[tuple[str, int]]:
    """This package's store: its address and port as Horovod's variables want them."""
    with Rendezvous(_ADDRESS, size) as store:
        yield store.address, store.port


@contextmanager
def horovods_store(size: int) -> Iterator[tuple[str, int]]:
    """The store that horovodrun and horovod.spark start for Gloo."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"{_HOST}:{size}"), size))
    try:
        yield _ADDRESS, port
    finally:
        server.stop()
        server._httpd.server_close()  # stop() leaves the socket open


STORES = {"ours": our_store, "Horovod's": horovods_store}


def run_rank(slot: Slot, gate: Connection) -> None:
    """One rank, in a process of its own: hear where the store is, meet the others, say how long.

    Args:
        slot: the rank's.
        gate: gives the store's address and port; takes the seconds; gives leave to end.
    """
    signal.alarm(int(3 * _LIMIT_SECONDS))  # no rank outlives a benchmark that was killed
    address, port = gate.recv()
    assignment = Assignment(slot, f"{_ADDRESS}:{port}", _ADDRESS, 0)
    # No user variables: every rank here has one thread.
    os.environ.update(worker_variables(slot, assignment, cores=1, gpus={}, user={}))
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
    gate.send(None)  # ready
    gate.recv()
    start = time.perf_counter()
    hvd.init()
    seconds = time.perf_counter() - start
    if hvd.size() != slot.size:
        raise RuntimeError(f"rank {slot.rank} met {hvd.size()} ranks instead of {slot.size}")
    gate.send(seconds)
    gate.recv()  # a rank that leaves early makes the others complain
    hvd.shutdown()


def measure(store: str, size: int) -> float:
    """The slowest rank's seconds in ``hvd.init()``.

    Raises:
        RuntimeError: a rank ended early, or took too long.
    """
    offers = (Offer(task, _HOST, _HOST, _ADDRESS, _INTERFACE) for task in range(size))
    fork = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        gates: list[Connection] = []
        ranks = []
        # The store starts after the forks: its threads must not be there while processes split.
        for slot in assign(offers):
            gate, theirs = fork.Pipe()
            with closing(theirs):
                rank = fork.Process(target=run_rank, args=(slot, theirs), daemon=True)
                rank.start()
            stack.callback(rank.kill)
            gates.append(stack.enter_context(gate))
            ranks.append(rank)
        where = stack.enter_context(STORES[store](size))
        _tell(gates, where)
        _hear(gates)
        _tell(gates, None)
        seconds = _hear(gates)
        _tell(gates, None)
        for rank in ranks:
            rank.join(_LIMIT_SECONDS)
    return max(seconds)


def _tell(gates: list[Connection], message: object) -> None:
    for gate in gates:
        gate.send(message)


def _hear(gates: list[Connection]) -> list[float]:
    deadline = time.monotonic() + _LIMIT_SECONDS
    answers = []
    for rank, gate in enumerate(gates):
        if not gate.poll(max(0.0, deadline - time.monotonic())):
            raise RuntimeError(f"rank {rank} of {len(gates)} took over {_LIMIT_SECONDS:.0f} s")
        try:
            answers.append(gate.recv())
        except EOFError:
            raise RuntimeError(f"rank {rank} of {len(gates)} ended early") from None
    return answers


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="hvd.init() with our store and Horovod's own.")
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[2, 8, 16, 32]
    )
    parser.add_argument(
        "--rounds", type=int, help=f"for every size (default: 3, and 1 from {_ONE_ROUND_FROM} up)"
    )
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    found: dict[str, dict[int, list[float]]] = {store: {} for store in STORES}
    for size in options.sizes:
        for _ in range(options.rounds or (1 if size >= _ONE_ROUND_FROM else 3)):
            for store in STORES:
                seconds = measure(store, size)
                found[store].setdefault(size, []).append(seconds)
                print(f"np={size}  {store}: {seconds:.2f} s", file=sys.stderr, flush=True)
    rows = []
    for size in options.sizes:
        ours, theirs = (median(found[store][size]) for store in STORES)
        cells = [f"{theirs / ours:.1f}", "-", "-"]
        if size >= _TARGET_FROM:
            cells = report.at_least(theirs / ours, _TARGET)
        rows.append([f"{size}", f"{ours:.2f}", f"{theirs:.2f}", *cells])
    print(f"\n{report.machine()}; the slowest rank's seconds in hvd.init(), medians\n")
    print(report.table(["np", *STORES, "ratio", "target", ""], rows))
    if options.json:
        report.write_json(options.json, {"seconds": found})


if __name__ == "__main__":
    main()
