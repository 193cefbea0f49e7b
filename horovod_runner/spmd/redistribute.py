"""Moves rows from all ranks of the program to the ranks that train.

    rank 0 [----------]          trainer 0 [-------------]
    rank 1 [------]        ->    trainer 1 [-------------]
    rank 2 [---------]
    rank 3 []

The rows of all ranks, in the order of ranks, are split into consecutive shares of equal size. Each
row goes directly from its rank to its trainer, in pieces. A rank therefore holds its input, its
share, and little more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from horovod_runner.common.text import ranks_text
from horovod_runner.errors import DataError
from horovod_runner.spmd.leaves import Array, Leaf, Serialized, flatten, rebuild
from horovod_runner.spmd.peers import Peers, RankBuffer

_PIECE_BYTES = 16 << 20


class _LeafInfo(msgspec.Struct, frozen=True):
    """A rank's description of one array or table."""

    path: str
    kind: str
    rows: int
    schema: bytes


class _DataInfo(msgspec.Struct, frozen=True):
    """A rank's description of its data, or the problem with them."""

    leaves: list[_LeafInfo] = []
    problem: str = ""


_decode_data_info: Final = msgspec.msgpack.Decoder(_DataInfo).decode


class Move(NamedTuple):
    """Consecutive rows that go from one rank to another, or stay.

    Attributes:
        source, target: ranks of the program.
        begin, end: the rows, as indexes into the source's rows.
        at: the index of the first row in the target's share.
    """

    source: int
    target: int
    begin: int
    end: int
    at: int


def shares(rows: int, parts: int) -> list[tuple[int, int]]:
    """Split rows into consecutive parts that differ by at most one row: (begin, end) of each."""
    quotient, remainder = divmod(rows, parts)
    ends = [quotient * (part + 1) + min(part + 1, remainder) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def moves(rows: Sequence[int], targets: Sequence[int]) -> list[Move]:
    """Plan which rows of each rank go to which target; targets in the order of their shares."""
    plan = []
    starts = list(accumulate(rows, initial=0))[:-1]
    for target, (begin, end) in zip(targets, shares(sum(rows), len(targets)), strict=True):
        for source, (start, count) in enumerate(zip(starts, rows, strict=True)):
            first, last = max(begin, start), min(end, start + count)
            if first < last:
                plan.append(Move(source, target, first - start, last - start, first - begin))
    return plan


def redistribute(data: Any, peers: Peers, targets: Sequence[int]) -> Any:
    """Do what :func:`horovod_runner.spmd.prepare_data` says, with shares for ``targets``."""
    leaves: list[tuple[str, Leaf]] = []
    try:
        leaves = list(flatten(data))
        infos = [
            _LeafInfo(path, type(leaf).__name__, leaf.rows, leaf.schema) for path, leaf in leaves
        ]
        info = _DataInfo(infos)
    except Exception as error:  # sent to all ranks: they would wait for this one
        info = _DataInfo(problem=str(error) or repr(error))
    encoded = peers.allgather(msgspec.msgpack.encode(info))
    all_infos = [_decode_data_info(other) for other in encoded]
    _check_equal(all_infos)
    results = []
    for index, (path, leaf) in enumerate(leaves):
        same_leaf = [other.leaves[index] for other in all_infos]
        plan = moves([other.rows for other in same_leaf], targets)
        conformed = _conformed(path, leaf, same_leaf)
        if isinstance(conformed, Array):
            results.append(_move_array(conformed, plan, peers))
        else:
            results.append(_move_table(conformed, plan, peers))
    return rebuild(data, iter(results))


def _check_equal(infos: Sequence[_DataInfo]) -> None:
    """Raise DataError unless all ranks passed the same structure, and none has a problem."""
    problems: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        if info.problem:
            problems.setdefault(info.problem, []).append(rank)
    if problems:
        listed = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in problems.items())
        raise DataError(f"prepare_data cannot move these data. {listed}")
    first = _structure(infos[0])
    for rank, info in enumerate(infos):
        if _structure(info) != first:
            raise DataError(
                "prepare_data was called with different structures. All ranks must pass the same "
                f"one; a rank without rows passes empty arrays. Rank 0: {first or 'nothing'}. "
                f"Rank {rank}: {_structure(info) or 'nothing'}."
            )


def _structure(info: _DataInfo) -> str:
    return ", ".join(f"{leaf.path}: {leaf.kind}" for leaf in info.leaves)


def _conformed(path: str, leaf: Leaf, same_leaf: Sequence[_LeafInfo]) -> Leaf:
    # Each schema with the first rank that has it.
    schemas = {info.schema: rank for rank, info in reversed([*enumerate(same_leaf)]) if info.rows}
    if not schemas:
        schemas = {same_leaf[0].schema: 0}
    try:
        return leaf.conform(list(reversed(schemas)))
    except ValueError as error:
        ranks = ", ".join(str(rank) for rank in sorted(schemas.values()))
        raise DataError(
            f"{path} has different types on ranks {ranks}: {error}. Convert it to one type before "
            "prepare_data."
        ) from None


def _steps(begin: int, end: int, row_bytes: float) -> Iterator[tuple[int, int]]:
    step = max(1, int(_PIECE_BYTES / max(row_bytes, 1.0)))
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _share(plan: Sequence[Move], rank: int) -> int:
    return sum(move.end - move.begin for move in plan if move.target == rank)


def _stays(leaf: Leaf, plan: Sequence[Move], rank: int) -> bool:
    """Whether a rank's share is exactly its input."""
    involved = [move for move in plan if rank in (move.source, move.target)]
    return involved == [Move(rank, rank, 0, leaf.rows, 0)]


def _move_array(leaf: Array, plan: Sequence[Move], peers: Peers) -> Any:
    rank = peers.rank
    if _stays(leaf, plan, rank):
        peers.exchange(iter(()), [])
        return leaf.data
    size = leaf.row_bytes()
    share = np.empty((_share(plan, rank), *leaf.data.shape[1:]), leaf.data.dtype)

    def outgoing() -> Iterator[RankBuffer]:
        for move in plan:
            if move.source == rank != move.target and size:
                for begin, end in _steps(move.begin, move.end, size):
                    # Does not copy rows that are contiguous in memory.
                    rows = np.ascontiguousarray(leaf.data[begin:end])
                    yield RankBuffer(move.target, _bytes_of(rows))

    incoming = [
        RankBuffer(move.source, _bytes_of(share[begin:end]))
        for move in plan
        if move.target == rank != move.source and size
        for begin, end in _steps(move.at, move.at + move.end - move.begin, size)
    ]
    for move in plan:
        if move.source == move.target == rank:
            share[move.at : move.at + move.end - move.begin] = leaf.data[move.begin : move.end]
    peers.exchange(outgoing(), incoming)
    return share


def _bytes_of(rows: np.ndarray[Any, Any]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def _move_table(leaf: Serialized, plan: Sequence[Move], peers: Peers) -> Any:
    rank = peers.rank
    pieces: dict[int, list[Any]] = {move.source: [] for move in plan if move.target == rank}
    row_bytes = leaf.row_bytes()
    outgoing = {
        move.target: _steps(move.begin, move.end, row_bytes)
        for move in plan
        if move.source == rank != move.target
    }
    while True:
        blobs = {
            target: memoryview(leaf.dump(*step))
            for target, steps in outgoing.items()
            if (step := next(steps, None)) is not None
        }
        received = _exchange_blobs(blobs, peers)
        if received is None:
            break
        for source, blob in received.items():
            pieces[source].append(leaf.load(memoryview(blob)))
    if _stays(leaf, plan, rank):
        return leaf.result(leaf.data)
    for move in plan:
        if move.source == move.target == rank:
            pieces[rank].append(leaf.part(move.begin, move.end))
    in_order = [piece for source in sorted(pieces) for piece in pieces.pop(source)]
    return leaf.result(leaf.join(in_order) if in_order else leaf.part(0, 0))


def _exchange_blobs(blobs: Mapping[int, memoryview], peers: Peers) -> dict[int, bytearray] | None:
    """Send blobs by target; returns those for this rank by source, None if no rank sent any."""
    lengths = np.array([len(blobs.get(target, b"")) for target in range(peers.size)], np.int64)
    all_lengths = [np.frombuffer(row, np.int64) for row in peers.allgather(lengths.tobytes())]
    if not any(row.any() for row in all_lengths):
        return None
    received = {
        source: bytearray(length)
        for source in range(peers.size)
        if (length := int(all_lengths[source][peers.rank]))
    }
    peers.exchange(
        iter([RankBuffer(target, blob) for target, blob in blobs.items()]),
        [RankBuffer(source, memoryview(blob)) for source, blob in received.items()],
    )
    return received
