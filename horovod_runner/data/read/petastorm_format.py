"""Petastorm datasets read without Petastorm: Parquet files whose cells its codecs encoded.

    _common_metadata --Unischema--> codec of each column
    *.parquet        --Files-----> cells --codecs--> columns of numbers

Nothing is unpickled, and no row is decoded on its own. Predicates, ngrams and transforms need
Petastorm's own code: see `petastorm_reader`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.pack import images, npy
from horovod_runner.data.read.files import Files
from horovod_runner.data.read.readers import ArrowReader
from horovod_runner.errors import DataError

_KEY = b"dataset-toolkit.unischema.v1"
_NUMBER_KINDS = "biuf"


@dataclass(frozen=True)
class Codec:
    """How the cells of a column are encoded, from the dataset's Unischema."""

    codec: str  # the class name of Petastorm's codec; empty if there is none
    dtype: str  # the name of the NumPy type, or of another class
    shape: tuple[int | None, ...] = ()  # of an array; None stands for any size

    @property
    def is_image(self) -> bool:
        """Whether cells are images of one size, which are decoded when they are packed."""
        return self.codec == "CompressedImageCodec" and None not in self.shape

    def decode(self, array: pa.Array, name: str) -> pa.Array:
        """Decode the cells of a column to numbers."""
        is_array = self.codec in ("NdarrayCodec", "CompressedNdarrayCodec")
        if (is_array or self.is_image) and array.null_count:
            raise DataError(
                f"column {name!r} has nulls ({array.null_count} of {len(array)} rows), and no "
                "value can replace an array: leave those rows out with filter="
            )
        if is_array:
            if self.codec == "CompressedNdarrayCodec":
                array = pa.array([_unzipped(cell, name) for cell in array.to_pylist()])
            return npy.decode(array, name, ragged=self.shape == (None,))
        if self.is_image:
            shape = tuple(size or 0 for size in self.shape)
            cells = [memoryview(cell.as_buffer()).cast("B") for cell in array]
            pixels = images.decode_unresized(cells, shape, self.dtype, name)
            return npy.fixed_lists(pixels.ravel(), shape)
        # Spark has no unsigned and no 8-bit numbers, so they are stored as wider ones.
        if self.shape == () and (dtype := _number_dtype(self.dtype)) is not None:
            return array.cast(pa.from_numpy_dtype(dtype))
        return array


def _number_dtype(name: str) -> np.dtype[Any] | None:
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return dtype if dtype.kind in _NUMBER_KINDS else None


def _unzipped(cell: bytes, name: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(cell)) as archive:
            return archive.read(archive.namelist()[0])
    except (zipfile.BadZipFile, zlib.error, EOFError, IndexError) as error:
        raise DataError(
            f"column {name!r} has a cell that is not a complete compressed array: {error}. It was "
            "cut or damaged when it was written"
        ) from error


@dataclass(frozen=True)
class PetastormFiles(ArrowReader):
    """The files of a Petastorm dataset as the ranks read them."""

    files: Files
    codecs: Mapping[str, Codec]

    def read(self, unit: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a unit, decoded."""
        for batch in self.files.read(unit, names):
            # A filter may need other columns, too.
            known = [name for name in batch.schema.names if name in self.schema.names]
            decoded = _decoded(batch.select(known), self.codecs)
            for field in decoded.schema:
                expected = self.schema.field(field.name).type
                if field.type != expected:
                    raise DataError(
                        f"column {field.name!r} has arrays of {field.type} and of {expected}: "
                        "arrays of several dimensions must have one shape. Leave the column out, "
                        "or write arrays of one shape"
                    )
            yield decoded


def _decoded(batch: pa.RecordBatch, codecs: Mapping[str, Codec]) -> pa.RecordBatch:
    none = Codec("", "")
    arrays = [
        codecs.get(name, none).decode(array, name)
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def decoding(files: Files, codecs: Mapping[str, Codec]) -> PetastormFiles:
    """Make a reader that decodes some files; a cell that does not fit refuses its column."""
    first = next((batch for batch in files.read(0, files.schema.names) if batch.num_rows), None)
    assert first is not None  # noqa: S101 - a unit has rows
    fields, refused = [], column_types.refused_in(files.schema)
    for name in files.schema.names:
        try:
            fields += _decoded(first.select([name]), codecs).schema
        except DataError as error:
            refused[name] = str(error)
    schema = column_types.refusing(pa.schema(fields), refused)
    return PetastormFiles(
        files,
        codecs,
        schema=schema,
        units=files.units,
        fingerprint=files.fingerprint,
        fill_null=files.fill_null,
        ragged=files.ragged,
    )


def codecs_of(filesystem: Any, folder: str) -> dict[str, Codec] | None:
    """Read the codecs from a dataset's Unischema.

    Returns:
        The codecs by column; None without a Unischema, as in datasets of make_spark_converter.
    """
    try:
        with filesystem.open(f"{folder}/_common_metadata", "rb") as handle:
            metadata = pq.read_schema(handle).metadata or {}
    except FileNotFoundError:
        return None
    if _KEY not in metadata:
        return None
    try:
        schema = _InertUnpickler(io.BytesIO(metadata[_KEY])).load()
        fields = schema.state["_fields"]
        return {name: _codec(*field.arguments[1:4]) for name, field in fields.items()}
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the Unischema of {folder} cannot be read: {error}. If Petastorm itself can read it, "
            "pass one of predicate, ngram and transform_spec, which read with Petastorm"
        ) from error


def _codec(dtype: Any, shape: Any, codec: Any) -> Codec:
    return Codec("" if codec is None else type(codec).__name__, dtype.__name__, tuple(shape))


class _Placeholder:
    """Stands for an object of any class: keeps its constructor's arguments and its state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> _Placeholder:
        self = super().__new__(cls)
        self.arguments = arguments
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _class(name)


@cache
def _class(name: str) -> type[_Placeholder]:
    return type(name, (_Placeholder,), {})
