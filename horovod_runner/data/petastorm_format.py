"""Petastorm's datasets as the Parquet files they are: nothing is unpickled, and no row by itself.

    _common_metadata --Unischema--> which column has which codec
    *.parquet        --Files-----> cells --codecs--> columns of numbers

What needs Petastorm's own code (predicates, ngrams, transforms) is petastorm_reader's.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from horovod_runner.data import images, npy
from horovod_runner.data.files import Files
from horovod_runner.data.readers import ArrowReader
from horovod_runner.errors import DataError

_KEY = b"dataset-toolkit.unischema.v1"
_NUMBERS = "biuf"


@dataclass(frozen=True)
class Cell:
    """What a column's cells are, as the dataset's Unischema says.

    Attributes:
        codec: the class of its codec; empty where there is none.
        dtype: the name of its NumPy type, or of another class.
        shape: of an array; None where it may be anything.
    """

    codec: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    @property
    def is_image(self) -> bool:
        """Whether cells are images of one size, which are decoded when they are packed."""
        return self.codec == "CompressedImageCodec" and None not in self.shape

    def decode(self, array: pa.Array, name: str) -> pa.Array:
        """A column's cells as numbers.

        Raises:
            DataError: a cell is not what the schema says, or there are nulls.
        """
        if self.codec in ("NdarrayCodec", "CompressedNdarrayCodec") or self.is_image:
            _refuse_nulls(array, name)
        if self.codec in ("NdarrayCodec", "CompressedNdarrayCodec"):
            if self.codec == "CompressedNdarrayCodec":
                array = pa.array([_unzipped(cell, name) for cell in array.to_pylist()])
            return npy.decode(array, name, ragged=self.shape == (None,))
        if self.is_image:
            shape = tuple(size or 0 for size in self.shape)
            found = images.decode_as_they_are(_views(array), shape, self.dtype, name)
            return npy.lists(found.ravel(), shape)
        # Spark has no unsigned numbers and nothing of 8 bits: they are stored as wider ones.
        if self.shape == () and (dtype := _number(self.dtype)) is not None:
            return array.cast(pa.from_numpy_dtype(dtype))
        return array


def _refuse_nulls(array: pa.Array, name: str) -> None:
    if array.null_count:
        raise DataError(
            f"column {name!r} has nulls ({array.null_count} of {len(array)} rows), for which "
            "nothing can stand in an array: leave those rows out with filter="
        )


def _number(name: str) -> np.dtype[Any] | None:
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.kind in _NUMBERS else None


def _views(array: pa.Array) -> list[memoryview]:
    return [memoryview(cell.as_buffer()).cast("B") for cell in array]


def _unzipped(cell: bytes, name: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(cell)) as archive:
            return archive.read(archive.namelist()[0])
    except (zipfile.BadZipFile, IndexError) as error:
        raise DataError(f"column {name!r} has a cell that is no whole array: {error}") from error


@dataclass(frozen=True)
class PetastormFiles(ArrowReader):
    """The files of a dataset, as the ranks read them.

    Attributes:
        files: Parquet files.
        cells: by column.
    """

    files: Files
    cells: Mapping[str, Cell]

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a unit, decoded.

        Raises:
            DataError: an array has another shape than those before it.
        """
        for batch in self.files.read(unit, names):
            found = _decoded(batch, self.cells)
            for own in found.schema:
                expected = self.schema.field(own.name).type
                if own.type != expected:
                    raise DataError(
                        f"column {own.name!r} has arrays of {own.type} and of {expected}: arrays "
                        "of several dimensions must have one shape"
                    )
            yield found


def _decoded(batch: pa.RecordBatch, cells: Mapping[str, Cell]) -> pa.RecordBatch:
    plain = Cell("", "")
    arrays = [
        cells.get(name, plain).decode(array, name)
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def decoding(files: Files, cells: Mapping[str, Cell]) -> PetastormFiles:
    """What reads some files so.

    Raises:
        DataError: there are no rows, or cells are not what they should be.
    """
    first = next((b for b in files.read(0, files.schema.names) if b.num_rows), None)
    assert first is not None  # noqa: S101 - a unit has rows
    known = _decoded(first, cells).schema
    schema = pa.schema([known.field(name) for name in files.schema.names])
    return PetastormFiles(
        files,
        cells,
        schema=schema,
        units=files.units,
        fingerprint=files.fingerprint,
        fill=files.fill,
        ragged=files.ragged,
    )


def cells_of(filesystem: Any, folder: str) -> dict[str, Cell] | None:
    """What a dataset's Unischema says; None if it has none, as what make_spark_converter writes.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with filesystem.open(f"{folder}/_common_metadata", "rb") as handle:
            metadata = pq.read_schema(handle).metadata or {}
    except FileNotFoundError:
        return None
    if _KEY not in metadata:
        return None
    try:
        schema = _Inert(io.BytesIO(metadata[_KEY])).load()
        return {name: _cell(*field.told[1:4]) for name, field in schema.state["_fields"].items()}
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the Unischema of {folder} cannot be read: {error}") from error


def _cell(dtype: Any, shape: Any, codec: Any) -> Cell:
    return Cell("" if codec is None else type(codec).__name__, dtype.__name__, tuple(shape))


class _Told:
    """Stands for an object of any class: what it was made with, and its state."""

    told: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *told: Any) -> _Told:
        self = super().__new__(cls)
        self.told = told
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that only remembers."""
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _class(name)


@cache
def _class(name: str) -> type[_Told]:
    return type(name, (_Told,), {})
