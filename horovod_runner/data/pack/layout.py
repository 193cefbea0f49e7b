"""Layout of a packed dataset: its files, and which columns share a matrix.

    layout.json         columns, rows per unit
    fixed-0             matrix of all columns of one number type, row after row
    fixed-1             the next type; a vector has a matrix to itself
    ends-0              first ragged column (text, bytes, lists): where each row ends in the values
                        of its unit
    values-0-3          first ragged column: the values of the rows of unit 3
    unit-0.json         exists once unit 0 is complete

A unit is a range of rows that one process packs at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from horovod_runner.data.pack.columns import Array, Column, Rows
from horovod_runner.data.pack.file_locks import write_whole
from horovod_runner.errors import DataError

_LAYOUT = "layout.json"


class Layout(msgspec.Struct, frozen=True):
    """Columns and row counts of a packed dataset."""

    columns: list[Column]  # in order
    units: list[int]  # rows of each

    @property
    def rows(self) -> int:
        """Rows of all units."""
        return sum(self.units)

    def groups(self) -> list[list[Column]]:
        """The columns of each matrix, in the order in which they lie side by side."""
        groups: dict[object, list[Column]] = {}
        for column in self.columns:
            if column.is_fixed:
                key = column.dtype if column.kind == "number" else column
                groups.setdefault(key, []).append(column)
        return list(groups.values())

    def ragged(self) -> list[Column]:
        """The columns whose rows differ in length."""
        return [column for column in self.columns if not column.is_fixed]

    def split(self, chunk: Chunk) -> dict[str, Rows]:
        """Split a chunk into its columns, by name."""
        columns = dict(chunk.ragged)
        for group, matrix in zip(self.groups(), chunk.matrices, strict=True):
            columns.update(columns_in(matrix, group))
        return columns

    def allocated_sizes(self) -> dict[str, int]:
        """Bytes of the files whose size is known before any row is written, by file name."""
        sizes = {}
        for number, group in enumerate(self.groups()):
            width = sum(column.width for column in group)
            sizes[f"fixed-{number}"] = self.rows * width * np.dtype(group[0].dtype).itemsize
        for number in range(len(self.ragged())):
            sizes[f"ends-{number}"] = self.rows * 8
        return sizes

    def save(self, folder: Path) -> None:
        """Write ``layout.json``, after the other files; also a crash leaves all of it or none."""
        write_whole(folder / _LAYOUT, msgspec.json.encode(self))

    @staticmethod
    def is_saved(folder: Path) -> bool:
        """Whether a folder has a ``layout.json``."""
        return (folder / _LAYOUT).exists()

    @staticmethod
    def load(folder: Path) -> Layout:
        """Read ``layout.json``."""
        try:
            return _decode_layout((folder / _LAYOUT).read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(
                f"{folder} holds no packed dataset: {error}. Something removed or damaged it "
                "during the run"
            ) from error


_decode_layout: Final = msgspec.json.Decoder(Layout).decode


def columns_in(matrix: Array, group: Sequence[Column]) -> Iterator[tuple[str, Rows]]:
    """Yield the columns that lie side by side in a matrix, by name, as views."""
    at = 0
    for column in group:
        part = matrix[:, at : at + column.width]
        yield column.name, Rows(part.reshape(len(matrix), *column.shape))
        at += column.width


class Chunk(msgspec.Struct):
    """Consecutive packed rows."""

    rows: int  # how many
    matrices: list[Any]  # one for each group of the layout, shape (rows, numbers)
    ragged: dict[str, Rows]  # by column


def fingerprint_of(content: str) -> str:
    """A short text that differs for different contents."""
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


#: Decodes ``unit-N.json``: bytes of the unit's values, by ragged column.
decode_unit_sizes: Final = msgspec.json.Decoder(dict[str, int]).decode


def pack(layout: Layout, rows: int, read: Callable[[Column], Rows]) -> Chunk:
    """Pack separate columns into matrices; ``read`` returns the rows of a column."""
    matrices = []
    for group in layout.groups():
        if len(group) == 1:
            matrices.append(read(group[0]).values.reshape(rows, group[0].width))
        else:
            matrices.append(np.stack([read(column).values for column in group], axis=1))
    return Chunk(rows, matrices, {column.name: read(column) for column in layout.ragged()})
