"""Moves data from all ranks of the program to those that train.

    rank 0 [----------]          trainer 0 [-------------]
    rank 1 [------]        ->    trainer 1 [-------------]
    rank 2 [---------]
    rank 3 []

The rows of all ranks, one after the other in the order of ranks, are cut into consecutive shares
of equal size. Each row goes straight from where it is to where it belongs, in pieces: a rank holds
what it had, its share, and little more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np

from horovod_runner.errors import DataError
from horovod_runner.spmd.leaves import Array, Leaf, Table, flatten
from horovod_runner.spmd.neighbours import Neighbours, Part
from horovod_runner.spmd.placement import shares
from horovod_runner.topology import ranks_text

_PIECE_BYTES = 16 << 20


class _Described(msgspec.Struct, frozen=True):
    """What a rank tells of one array or table."""

    path: str
    kind: str
    rows: int
    schema: bytes


class _Description(msgspec.Struct, frozen=True):
    """What a rank tells of what it was given; or what is wrong with that."""

    leaves: list[_Described] = []
    problem: str = ""


class Move(NamedTuple):
    """Rows of one rank that belong to another one, or to itself.

    Attributes:
        source, target: ranks of the program.
        begin, end: of the rows, among those of the source.
        at: where they begin, among those of the target.
    """

    source: int
    target: int
    begin: int
    end: int
    at: int


def moves(rows: Sequence[int], targets: Sequence[int]) -> list[Move]:
    """What goes where.

    Args:
        rows: how many each rank has.
        targets: the ranks that train, in the order of their shares.
    """
    found = []
    starts = list(accumulate(rows, initial=0))[:-1]
    for target, (begin, end) in zip(targets, shares(sum(rows), len(targets)), strict=True):
        for source, (start, count) in enumerate(zip(starts, rows, strict=True)):
            first, last = max(begin, start), min(end, start + count)
            if first < last:
                found.append(Move(source, target, first - start, last - start, first - begin))
    return found


def redistribute(data: Any, neighbours: Neighbours, targets: Sequence[int]) -> Any:
    """What :func:`horovod_runner.spmd.prepare_data` says.

    Raises:
        DataError: some rank's data do not fit the others'; all ranks raise it.
    """
    leaves: list[tuple[str, Leaf]] = []
    try:
        leaves, rebuild = flatten(data)
        described = [
            _Described(path, type(leaf).__name__, leaf.rows, leaf.schema) for path, leaf in leaves
        ]
        own = _Description(described)
    except Exception as error:  # told to all: they would wait for this rank
        own = _Description(problem=str(error) or repr(error))
    said = neighbours.allgather(msgspec.msgpack.encode(own))
    ranks = [msgspec.msgpack.decode(text, type=_Description) for text in said]
    _check_equal(ranks)
    made = []
    for index, (path, leaf) in enumerate(leaves):
        there = [rank.leaves[index] for rank in ranks]
        plan = moves([each.rows for each in there], targets)
        conformed = _conformed(path, leaf, there)
        if isinstance(conformed, Array):
            made.append(_move_array(conformed, plan, neighbours))
        elif isinstance(conformed, Table):
            made.append(_move_table(conformed, plan, neighbours))
    return rebuild(made)


def _check_equal(ranks: Sequence[_Description]) -> None:
    problems: dict[str, list[int]] = {}
    for i, each in enumerate(ranks):
        if each.problem:
            problems.setdefault(each.problem, []).append(i)
    if problems:
        told = "; ".join(f"{ranks_text(there)}: {problem}" for problem, there in problems.items())
        raise DataError(f"prepare_data was given what it cannot move. {told}")
    first = [(leaf.path, leaf.kind) for leaf in ranks[0].leaves]
    for rank, each in enumerate(ranks):
        own = [(leaf.path, leaf.kind) for leaf in each.leaves]
        if own != first:
            one, other = (", ".join(f"{p}: {k}" for p, k in found) for found in (first, own))
            raise DataError(
                "prepare_data was given other things on other ranks: all give the same, a rank "
                f"without rows an empty one. Rank 0: {one or 'nothing'}. "
                f"Rank {rank}: {other or 'nothing'}."
            )


def _conformed(path: str, leaf: Leaf, there: Sequence[_Described]) -> Leaf:
    schemas = {each.schema: rank for rank, each in reversed([*enumerate(there)]) if each.rows}
    if not schemas:
        schemas = {there[0].schema: 0}
    try:
        return leaf.conform(list(reversed(schemas)))
    except ValueError as error:
        ranks = ", ".join(str(rank) for rank in sorted(schemas.values()))
        raise DataError(
            f"{path} is not of one kind on all ranks (look at ranks {ranks}): {error}. Cast them "
            "before prepare_data."
        ) from None


def _steps(begin: int, end: int, row_bytes: float) -> Iterator[tuple[int, int]]:
    """Pieces of some rows."""
    step = max(1, int(_PIECE_BYTES / max(row_bytes, 1.0)))
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _share(plan: Sequence[Move], rank: int) -> int:
    """How many rows a rank receives."""
    return sum(move.end - move.begin for move in plan if move.target == rank)


def _stays(leaf: Leaf, plan: Sequence[Move], rank: int) -> bool:
    """Whether a rank's share is just what it has."""
    own = [move for move in plan if rank in (move.source, move.target)]
    return own == [Move(rank, rank, 0, leaf.rows, 0)]


def _move_array(leaf: Array, plan: Sequence[Move], neighbours: Neighbours) -> Any:
    rank = neighbours.rank
    if _stays(leaf, plan, rank):
        neighbours.exchange(iter(()), [])
        return leaf.data
    size = leaf.row_bytes()
    share = np.empty((_share(plan, rank), *leaf.data.shape[1:]), leaf.data.dtype)

    def outgoing() -> Iterator[Part]:
        for move in plan:
            if move.source == rank != move.target and size:
                for begin, end in _steps(move.begin, move.end, size):
                    # No copy where the rows lie one after the other.
                    rows = np.ascontiguousarray(leaf.data[begin:end])
                    yield Part(move.target, _bytes_of(rows))

    incoming = [
        Part(move.source, _bytes_of(share[begin:end]))
        for move in plan
        if move.target == rank != move.source and size
        for begin, end in _steps(move.at, move.at + move.end - move.begin, size)
    ]
    for move in plan:
        if move.source == move.target == rank:
            share[move.at : move.at + move.end - move.begin] = leaf.data[move.begin : move.end]
    neighbours.exchange(outgoing(), incoming)
    return share


def _bytes_of(rows: np.ndarray[Any, Any]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def _move_table(leaf: Table, plan: Sequence[Move], neighbours: Neighbours) -> Any:
    rank, size = neighbours.rank, neighbours.size
    pieces: dict[int, list[Any]] = {move.source: [] for move in plan if move.target == rank}
    row_bytes = leaf.row_bytes()
    sends = {
        move.target: _steps(move.begin, move.end, row_bytes)
        for move in plan
        if move.source == rank != move.target
    }
    while True:
        blobs = {}
        for target, steps in sends.items():
            step = next(steps, None)
            if step is not None:
                blobs[target] = memoryview(leaf.dump(*step))
        lengths = np.array([len(blobs.get(target, b"")) for target in range(size)], np.int64)
        said = [np.frombuffer(row, np.int64) for row in neighbours.allgather(lengths.tobytes())]
        if not any(row.any() for row in said):
            break
        came = {source: bytearray(n) for source in range(size) if (n := int(said[source][rank]))}
        neighbours.exchange(
            iter([Part(target, blob) for target, blob in blobs.items()]),
            [Part(source, memoryview(data)) for source, data in came.items()],
        )
        for source, data in came.items():
            pieces[source].append(leaf.load(memoryview(data)))
    if _stays(leaf, plan, rank):
        return leaf.give(leaf.data)
    for move in plan:
        if move.source == move.target == rank:
            pieces[rank].append(leaf.part(move.begin, move.end))
    found = [piece for source in sorted(pieces) for piece in pieces.pop(source)]
    return leaf.give(leaf.join(found) if found else leaf.part(0, 0))
