"""Answers the PMI-1 requests of MPICH: how MPI ranks find each other without mpiexec.

    worker: MPI_Init  ---PMI_FD, a socket pair--->  Pmi, in the task  ---channel--->  driver
        limits, names, its own values               answered here
        init; put ..., barrier_in                   Fence: waits for all ranks, carries the values
        get of another rank's value                 Lookup: at most once after each Fence

A rank under MPI is this package's child process like any other: no mpiexec, ssh or daemon is
needed. Requests are lines of ``name=value`` words, as in MPICH's ``src/pmi/src/pmi_wire.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

from horovod_runner.common.slots import Slot
from horovod_runner.wire.messages import Assignment, Fence, Lookup

_LINE_BYTES: Final = 64 << 10
# The longest names and values that MPICH may send; a value's line has to fit its buffer.
_MAXES = "kvsname_max=256 keylen_max=64 vallen_max=1024"
_MAPPING = "PMI_process_mapping"


class Pmi:
    """The PMI server of one worker."""

    def __init__(self, assignment: Assignment, send: Callable[[Fence | Lookup], None]) -> None:
        self._rank, self._send = assignment.slot.rank, send
        self._values = {_MAPPING: assignment.mapping}
        self._put: dict[str, str] = {}
        self._partial = b""
        self._wanted = ""
        self._fence_answer = b""
        self._looked_up = True  # before the first fence the others have published nothing
        self._answers = {
            "get_maxes": _line("maxes", f"{_MAXES} rc=0"),
            "get_appnum": _line("appnum", "appnum=0 rc=0"),
            "get_my_kvsname": _line("my_kvsname", f"kvsname={assignment.space} rc=0"),
            "get_universe_size": _line("universe_size", f"size={assignment.slot.size} rc=0"),
            "put": _line("put_result", "rc=0 msg=success"),
            "finalize": _line("finalize_ack", "rc=0"),
            "abort": b"",  # the worker's exit code reports it
        }

    def feed(self, data: bytes) -> bytes:
        """Read the worker's requests and return the answers that are ready.

        The answers that need the driver come from :meth:`fenced` and :meth:`looked_up`.

        Raises:
            ValueError: ``data`` is not from MPICH.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LINE_BYTES:
            raise ValueError(f"{len(self._partial)} bytes without an end of line")
        return b"".join(self._answer(line.decode()) for line in lines if line.strip())

    def fenced(self) -> bytes:
        """The answer once all ranks have reached the fence."""
        return self._fence_answer

    def looked_up(self, values: Mapping[str, str]) -> bytes:
        """The answer once the driver has sent the values that all ranks published."""
        self._values |= values
        self._looked_up = True
        key, self._wanted = self._wanted, ""
        return self._get(key) if key else b""

    def _answer(self, line: str) -> bytes:
        words = dict(word.partition("=")[::2] for word in line.split())
        command, key = words.get("cmd", ""), words.get("key", "")
        if command == "get":
            return self._get(key)
        if command == "init":
            # Wait for all ranks here: inside MPI a waiting rank keeps its core busy.
            return self._fence(_line("response_to_init", "pmi_version=1 pmi_subversion=1 rc=0"))
        if command == "barrier_in":
            self._looked_up = False
            return self._fence(_line("barrier_out", "rc=0"))
        if command == "put":
            self._put[key] = words.get("value", "")
        answer = self._answers.get(command)
        if answer is None:
            raise ValueError(f"unknown request {command!r}")
        return answer

    def _fence(self, answer: bytes) -> bytes:
        self._fence_answer = answer
        self._values |= self._put
        self._send(Fence(self._rank, self._put))
        self._put = {}
        return b""

    def _get(self, key: str) -> bytes:
        # MPICH asks for some keys that no rank publishes, but only before the first fence.
        if key not in self._values and not self._looked_up:
            self._wanted = key
            self._send(Lookup(self._rank))
            return b""
        if key not in self._values:
            return _line("get_result", "rc=-1 msg=key_not_found")
        return _line("get_result", f"rc=0 msg=success value={self._values[key]}")


def _line(command: str, words: str) -> bytes:
    return f"cmd={command} {words}\n".encode()


def segments(assignment: Assignment) -> list[str]:
    """The shared memory files of a host's ranks, which MPICH leaves behind without MPI_Finalize.

    Their names follow MPICH's ``src/mpid/ch4/shm/posix/posix_init.c``. Up to 5.0 it hashes the name
    of the PMI key-value space; later versions append the count of initializations to that name.
    """
    numbers = [_fnv(name.encode()) for name in (assignment.space, f"{assignment.space}-1")]
    return [
        f"/dev/shm/mpich_{kind}_{number:x}_{assignment.host}"  # noqa: S108 - MPICH's
        for number in numbers
        for kind in ("shm", "vci")
    ]


def _fnv(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
    number = 2166136261
    for byte in data:
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return number


def process_mapping(slots: Sequence[Slot]) -> str:
    """Which ranks share a host, in MPICH's format: blocks of hosts with the same number of ranks.

    Args:
        slots: of all ranks, in rank order; ranks of one host are neighbours.
    """
    sizes = [len(list(ranks)) for _, ranks in groupby(slots, lambda slot: slot.host)]
    blocks, start = [], 0
    for size, hosts in groupby(sizes):
        count = len(list(hosts))
        blocks.append(f"({start},{count},{size})")
        start += count
    return f"(vector,{','.join(blocks)})"
