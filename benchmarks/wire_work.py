"""What the ranks of wire.py do: reductions and steps over links, and a training."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

DEVICE = "eth0"
_CONNECTIONS = 4
_BUFFER = 1 << 20
_STEPS = 4  # in a turn
_WIDTH, _LAYERS = 1024, 4  # 16.8 MB of gradients
COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")


def measure(
    sizes: dict[str, int], turns: int, seconds: float, *, peers: bool, steps: bool
) -> dict[str, Any] | None:
    """Measure one cluster of hosts; the ranks' ``main``.

    Args:
        sizes: bytes of the tensors, by name.
        turns: how often each is measured.
        seconds: the length of a turn, roughly.
        peers: whether torch.distributed is measured as well.
        steps: whether training steps are.

    Returns:
        On rank 0: the raw link's bytes per second and round trip; the seconds by size and system;
        the bytes that left a host in one reduction, by size, and the percentage of the machine's
        cores that were busy; the seconds of a step and the bytes that left a host, by way.
    """
    import horovod.torch as hvd
    import psutil
    import torch
    import torch.distributed

    hvd.init()
    torch.distributed.init_process_group("gloo")
    links = [raw_link()]
    found: dict[str, dict[str, list[float]]] = {}
    sent, busy = {}, {}
    for name, size in sizes.items():
        tensor = torch.zeros(size // 4)

        def ours(tensor: Any = tensor, name: str = name) -> None:
            hvd.allreduce_(tensor, name=name, op=hvd.Sum)

        def theirs(tensor: Any = tensor) -> None:
            torch.distributed.all_reduce(tensor)

        systems = {"ours": ours, **({"torch": theirs} if peers else {})}
        expected = links[0]["round_trip"] + 2 * size / links[0]["rate"]
        psutil.cpu_percent()
        found[name] = _alternate(systems, turns, max(1, min(200, round(seconds / expected))))
        busy[name] = psutil.cpu_percent()
        sent[name] = _sent_by(ours)
    links.append(raw_link())
    ways: dict[str, list[float]] = {}
    sent_by_steps = {}
    if steps:
        each = {f"ours, {name}": _step(name) for name in COMPRESSIONS}
        each["torch"] = _step(None)
        ways = _alternate(each, turns, _STEPS)
        sent_by_steps = {name: _sent_by(step) for name, step in each.items()}
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if hvd.rank():
        return None
    result = {"links": links, "seconds": found, "sent": sent, "busy": busy, "steps": ways}
    return {**result, "sent_by_steps": sent_by_steps, "size": hvd.size()}


def _alternate(
    systems: dict[str, Callable[[], None]], turns: int, count: int
) -> dict[str, list[float]]:
    """Seconds of each call, by system and turn; all ranks begin a turn together."""
    import torch.distributed

    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for turn in range(turns + 1):
        for system in list(systems) if turn % 2 else list(systems)[::-1]:
            calls = count if turn else min(count, 2)  # the first turn makes buffers, connections
            torch.distributed.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                systems[system]()
            if turn:
                seconds[system].append((time.perf_counter() - start) / calls)
    return seconds


def _sent_by(call: Callable[[], None]) -> float:
    """How many bytes leave this host in a call."""
    import torch.distributed

    torch.distributed.barrier()
    before = _sent_bytes()
    for _ in range(2):
        call()
    return (_sent_bytes() - before) / 2


def _sent_bytes() -> int:
    """How many bytes have left this host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[8])
    raise RuntimeError(f"no {DEVICE} on this host")


def raw_link() -> dict[str, float]:
    """What the links carry without any library; every rank calls it.

    Every host sends to the next one over several TCP connections, all at the same time.

    Returns:
        The slowest host's bytes per second, the round trip of a byte in seconds, and the percentage
        of the machine's cores that were busy.
    """
    import psutil
    import torch.distributed as dist

    import horovod.torch as hvd  # isort: skip

    address = next(
        each.address for each in psutil.net_if_addrs()[DEVICE] if each.family == socket.AF_INET
    )
    result: dict[str, float] = {}
    with socket.create_server((address, 0), backlog=_CONNECTIONS) as server:
        mine = (hvd.local_rank(), hvd.cross_rank(), server.getsockname())
        everyone: list[Any] = [None] * hvd.size()
        dist.all_gather_object(everyone, mine)
        if hvd.local_rank() == 0:
            places = {host: place for local, host, place in everyone if local == 0}
            following = places[(hvd.cross_rank() + 1) % len(places)]
            outgoing = [socket.create_connection(following) for _ in range(_CONNECTIONS)]
            incoming = [server.accept()[0] for _ in range(_CONNECTIONS)]
            for connection in (*outgoing, *incoming):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            result["round_trip"] = _round_trip(outgoing[0], incoming[0], hvd.cross_rank())
        dist.barrier()
        if hvd.local_rank() == 0:
            psutil.cpu_percent()
            result["rate"] = _stream(outgoing, incoming)
            result["busy"] = psutil.cpu_percent()
            for connection in (*outgoing, *incoming):
                connection.close()
    results: list[Any] = [None] * hvd.size()
    dist.all_gather_object(results, result)
    leaders = [each for each in results if each]
    return {
        "rate": min(each["rate"] for each in leaders),
        "round_trip": leaders[0]["round_trip"],
        "busy": leaders[0]["busy"],
    }


def _round_trip(outgoing: socket.socket, incoming: socket.socket, host: int) -> float:
    """The seconds of two exchanges of a byte between hosts 0 and 1; both send, then receive."""
    if host > 1:
        return 0.0
    connection = outgoing if host == 0 else incoming
    times = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(2):
            connection.sendall(b"a")
            connection.recv(1)
        times.append(time.perf_counter() - start)
    return median(times)


def _stream(
    outgoing: list[socket.socket],
    incoming: list[socket.socket],
    warm: float = 0.3,
    last: float = 1.0,
) -> float:
    """Bytes per second that arrive while all connections of all hosts are busy."""
    begin = time.perf_counter()
    from_then, until = begin + warm, begin + warm + last
    counted = [0] * len(incoming)

    def send(connection: socket.socket) -> None:
        data = bytes(_BUFFER)
        while time.perf_counter() < until + 0.1:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    def receive(number: int) -> None:
        buffer = bytearray(_BUFFER)
        while count := incoming[number].recv_into(buffer):
            if from_then < time.perf_counter() < until:
                counted[number] += count

    threads = [threading.Thread(target=send, args=[each]) for each in outgoing]
    threads += [threading.Thread(target=receive, args=[each]) for each in range(len(incoming))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counted) / last


def _step(compression: str | None) -> Callable[[], None]:
    """A step of a network with 16.8 MB of gradients; None uses torch's DDP."""
    import horovod.torch as hvd
    import torch

    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-6)
    if compression is None:
        net = torch.nn.parallel.DistributedDataParallel(net)
    else:
        names = [(f"{compression}.{name}", each) for name, each in net.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            optimizer, names, compression=getattr(hvd.Compression, compression)
        )
    x = torch.randn(32, _WIDTH)

    def once() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return once


def accuracy(kinds: dict[str, tuple[str, dict[str, int]]], epochs: int, seed: int) -> Any:
    """Train a small convolutional network on handwritten digits; a ``main``.

    Args:
        kinds: the name and the arguments of each compression, by title.
        epochs: of each training.
        seed: of weights and order.

    Returns:
        The share of test digits that are right, by title.
    """
    import horovod.torch as hvd
    import torch
    from sklearn.datasets import load_digits

    hvd.init()
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    y = torch.tensor(digits.target)[order]
    train, test = slice(0, 1400), slice(1400, None)
    found = {}
    for title, (name, arguments) in kinds.items():
        torch.manual_seed(seed)
        net = torch.nn.Sequential(
            *(torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU()),
            *(torch.nn.Conv2d(32, 64, 3, padding=1, stride=2), torch.nn.ReLU()),
            *(torch.nn.Flatten(), torch.nn.Linear(1024, 128), torch.nn.ReLU()),
            torch.nn.Linear(128, 10),
        )
        compression = getattr(hvd.Compression, name)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            net.named_parameters(),
            compression(**arguments) if arguments else compression,
        )
        shuffled = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for batch in torch.randperm(1400, generator=shuffled).split(64):
                part = batch[hvd.rank() :: hvd.size()]
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x[train][part]), y[train][part])
                loss.backward()
                optimizer.step()
        right = net(x[test]).argmax(1) == y[test]
        found[title] = float(right.float().mean())
    return found
