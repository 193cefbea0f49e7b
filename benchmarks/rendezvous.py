"""Duration of ``hvd.init()`` over MPI, over Gloo with our store, and with Horovod's own store.

All ranks are on this machine. They are forks of one process that has imported horovod.torch, so no
import is timed. The three take turns, so that a slow phase of the machine slows all of them.

    python benchmarks/rendezvous.py [--sizes 2,8,16,32,64,128] [--rounds 3] [--json rendezvous.json]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import cast

import msgspec
import report

from horovod_runner.common.slots import Controller, Offer
from horovod_runner.driver.placement import assign
from horovod_runner.host import software
from horovod_runner.host.control_groups import available_cores
from horovod_runner.wire.messages import Assignment, Fence, Lookup
from horovod_runner.worker.startup.pmi import Pmi, process_mapping, segments
from horovod_runner.worker.startup.rank_environment import mpi_variables, worker_variables
from horovod_runner.worker.startup.rendezvous import Rendezvous

_ADDRESS = "127.0.0.1"
_INTERFACE = "lo"
_HOST = "benchmark"
_LIMIT_SECONDS = 300.0  # for each step of all ranks
_ONE_ROUND_FROM = 32  # Horovod's own store needs most of a minute there
_TARGET, _TARGET_FROM = 8, 16


@contextmanager
def our_store(size: int) -> Iterator[tuple[str, int]]:
    """Start this package's store; yields its address and port."""
    with Rendezvous(_ADDRESS, size) as store:
        yield store.address, store.port


@contextmanager
def horovods_store(size: int) -> Iterator[tuple[str, int]]:
    """Start the store of horovodrun and horovod.spark for Gloo; yields its address and port."""
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


@contextmanager
def no_store(size: int) -> Iterator[tuple[str, int]]:
    """Start no store: MPI's requests are answered over a socket to each rank."""
    yield "", 0


MPI, GLOO, HOROVODS = "ours (MPI)", "ours (Gloo)", "Horovod's"
STORES = {MPI: no_store, GLOO: our_store, HOROVODS: horovods_store}


class Answers:
    """Answers the ranks' MPI startup requests in a thread, as tasks and driver do."""

    def __init__(self, assignments: list[Assignment]) -> None:
        self.theirs: list[socket.socket] = []
        self._values: dict[str, str] = {}
        self._fenced: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._pmis: list[Pmi] = []
        self._ours: list[socket.socket] = []
        for rank, assignment in enumerate(assignments):
            ours, theirs = socket.socketpair()
            self._selector.register(ours, selectors.EVENT_READ, rank)
            self._ours.append(ours)
            self.theirs.append(theirs)
            self._pmis.append(Pmi(assignment, self._take))
        self._asked: list[Fence | Lookup] = []

    def start(self) -> None:
        """Start the thread, after the ranks were forked: a fork does not copy threads."""
        for each in self.theirs:
            each.close()
        threading.Thread(target=self._answer, daemon=True).start()

    def _take(self, asked: Fence | Lookup) -> None:
        self._asked.append(asked)

    def _answer(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                data = self._ours[key.data].recv(1 << 16)
                if not data:
                    self._selector.unregister(key.fileobj)
                    continue
                self._ours[key.data].sendall(self._pmis[key.data].feed(data))
                while self._asked:
                    self._on(self._asked.pop())

    def _on(self, asked: Fence | Lookup) -> None:
        if isinstance(asked, Lookup):
            self._ours[asked.rank].sendall(self._pmis[asked.rank].found(self._values))
            return
        self._values |= asked.values
        self._fenced.append(asked.rank)
        if len(self._fenced) == len(self._pmis):
            self._fenced.clear()
            for ours, pmi in zip(self._ours, self._pmis, strict=True):
                ours.sendall(pmi.fenced())


def run_rank(assignment: Assignment, gate: Connection, pmi: socket.socket | None) -> None:
    """Run one rank in a child process: receive the store's address, and time ``hvd.init()``.

    Args:
        assignment: the rank's assignment, without the store.
        gate: delivers the store's address and port, takes the seconds, and tells the rank to end.
        pmi: the socket for MPI's startup requests, if it uses MPI.
    """
    import horovod.torch as hvd  # the rank has started

    signal.alarm(int(3 * _LIMIT_SECONDS))  # no rank outlives a killed benchmark
    slot = assignment.slot
    address, port = gate.recv()
    assignment = msgspec.structs.replace(assignment, rendezvous=f"{_ADDRESS}:{port}")
    os.environ.update(worker_variables(slot, assignment, available_cores(), gpus={}, user={}))
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
    if pmi is not None:
        os.environ["PMI_FD"] = str(pmi.fileno())
    gate.send(None)  # ready
    gate.recv()
    start = time.perf_counter()
    hvd.init()
    seconds = time.perf_counter() - start
    if hvd.size() != slot.size:
        raise RuntimeError(f"rank {slot.rank} met {hvd.size()} ranks instead of {slot.size}")
    gate.send(seconds)
    gate.recv()  # the others print errors when a rank ends early
    hvd.shutdown()


def measure(store: str, size: int) -> float:
    """Seconds of the slowest rank in ``hvd.init()``.

    Raises:
        TimeoutError: a rank took too long.
        RuntimeError: a rank ended early.
    """
    slots = assign(Offer(task, _HOST, _HOST, _ADDRESS, _INTERFACE) for task in range(size))
    controller: Controller = "mpi" if store == MPI else "gloo"
    space, mapping = secrets.token_hex(8), process_mapping(slots)
    assignments = [
        Assignment(slot, "", _ADDRESS, 0, {}, controller, space, mapping) for slot in slots
    ]
    answers = Answers(assignments)
    fork = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        stack.callback(_remove_segments, assignments[0])
        gates: list[Connection] = []
        ranks = []
        # The store starts after the forks: a process must not fork while it has threads.
        for assignment, pmi in zip(assignments, answers.theirs, strict=True):
            gate, theirs = fork.Pipe()
            given = assignment, theirs, pmi if store == MPI else None
            with closing(theirs):
                rank = fork.Process(target=run_rank, args=given, daemon=True)
                rank.start()
            stack.callback(rank.kill)
            gates.append(stack.enter_context(gate))
            ranks.append(rank)
        answers.start()
        where = stack.enter_context(STORES[store](size))
        _tell(gates, where)
        _hear(gates)
        _tell(gates, None)
        seconds = _hear(gates)
        _tell(gates, None)
        for rank in ranks:
            rank.join(_LIMIT_SECONDS)
    return max(seconds)


def _remove_segments(assignment: Assignment) -> None:
    for path in segments(assignment):
        Path(path).unlink(missing_ok=True)


def _tell(gates: list[Connection], message: object) -> None:
    for gate in gates:
        gate.send(message)


def _hear(gates: list[Connection]) -> list[float]:
    deadline = time.monotonic() + _LIMIT_SECONDS
    ranks = {gate: rank for rank, gate in enumerate(gates)}
    answers = []
    while ranks:
        ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = len(ranks)
            raise TimeoutError(f"{late} of {len(gates)} ranks took over {_LIMIT_SECONDS:.0f} s")
        for gate in cast("list[Connection]", ready):
            rank = ranks.pop(gate)
            try:
                answers.append(gate.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} of {len(gates)} ended early") from None
    return answers


def measure_all(
    stores: list[str], sizes: list[int], rounds: int | None
) -> dict[str, dict[int, list[float]]]:
    """Seconds by store and size, without sizes at which a rank ended early."""
    found: dict[str, dict[int, list[float]]] = {store: {} for store in stores}
    slow, failed = set[str](), set[str]()  # with more ranks it would be even slower, or fail
    for size in sizes:
        for _ in range(rounds or (1 if size >= _ONE_ROUND_FROM else 3)):
            for store in stores:
                if store in failed:
                    continue
                try:
                    seconds = _LIMIT_SECONDS if store in slow else measure(store, size)
                except TimeoutError:
                    slow.add(store)
                    seconds = _LIMIT_SECONDS
                except RuntimeError as error:
                    failed.add(store)
                    print(f"np={size}  {store}: {error}", file=sys.stderr, flush=True)
                    continue
                found[store].setdefault(size, []).append(seconds)
                print(f"np={size}  {store}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="hvd.init() with our store and Horovod's own.")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[2, 8, 16, 32, 64, 128],
    )
    parser.add_argument(
        "--rounds", type=int, help=f"for every size (default: 3, and 1 from {_ONE_ROUND_FROM} up)"
    )
    parser.add_argument("--json", type=Path, help="where to write the raw data")
    options = parser.parse_args()
    os.environ.update(mpi_variables(_INTERFACE))  # UCX reads it when it is loaded
    import horovod.torch  # noqa: F401 - the ranks are forked

    stores = [store for store in STORES if store != MPI or "mpich" in software.installed()]
    found = measure_all(stores, options.sizes, options.rounds)
    rows = []
    for size in options.sizes:
        every = {store: median(found[store].get(size, [math.nan])) for store in stores}
        row = [f"{size}"]
        row += ["failed" if math.isnan(each) else f"{each:.2f}" for each in every.values()]
        for store in stores[:-1]:
            ratio = every[HOROVODS] / every[store]
            what = f"{store} against Horovod's own server, np={size}"
            if math.isnan(ratio):
                row += ["-", "-", "-"]
            elif size < _TARGET_FROM:
                row += [f"{ratio:.1f}", "-", "-"]
            else:
                row += report.at_least(what, ratio, _TARGET)
        rows.append(row)
    print(f"\n{report.machine()}; the slowest rank's seconds in hvd.init(), medians; ")
    print(f"{_LIMIT_SECONDS:.0f} stands for more\n")
    ratios = [head for store in stores[:-1] for head in (f"Horovod's / {store}", "target", "")]
    print(report.table(["np", *stores, *ratios], rows))
    if options.json:
        report.write_json(options.json, {"seconds": found})


if __name__ == "__main__":
    main()
