"""Parts of a batch: columns side by side, converted to one type, padded where rows are ragged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.pack.buffers import Buffers
from horovod_runner.data.pack.columns import Array, Column, Columns, Rows
from horovod_runner.data.pack.images import Image, ImageLayout, decode_rows, image_columns
from horovod_runner.errors import DataError

_decode_lists: Final = msgspec.msgpack.Decoder(list[Any]).decode


@dataclass(frozen=True)
class Field:
    """One part of a batch."""

    name: str  # in the batch
    columns: tuple[Column, ...]  # that lie side by side in it
    single: bool  # it is one column by itself, not a list of columns
    dtype: str = ""  # to convert numbers to; empty keeps their type
    pad: float | None = None  # what fills up short rows of a ragged column; None keeps them ragged
    # To fill up or cut rows to, one for each level of lists; None: the longest row of the batch.
    length: Any = None
    image: Image | None = None  # what images become
    image_name: str = ""  # of the images among the dataset's columns
    layout: ImageLayout = "HWC"  # of the images in the batch

    @property
    def is_uniform(self) -> bool:
        """Whether all batches with the same number of rows have the same shape."""
        return (
            not self.single
            or self.image is not None
            or self.columns[0].is_fixed
            or (
                self.columns[0].kind in ("list", "object")
                and self.pad is not None
                and self.length is not None
            )
        )

    @property
    def row_shape(self) -> tuple[int | None, ...]:
        """Shape of one row; None stands for a size that differs from batch to batch."""
        if self.image is not None:
            height, width, channels = self.image.shape
            is_chw = self.layout == "CHW"
            return (channels, height, width) if is_chw else (height, width, channels)
        if not self.single:
            return (sum(column.width for column in self.columns),)
        column = self.columns[0]
        if column.kind == "object":
            return self.length or (None,) * len(column.shape)
        if column.kind == "list":
            return (self.length,)
        return column.shape

    @property
    def result_dtype(self) -> str:
        """Type of the numbers in the batch."""
        if self.dtype or self.image is not None:
            return self.dtype or "uint8"
        return str(np.result_type(*(column.dtype for column in self.columns)).name)

    def of(self, taken: Mapping[str, Rows], buffers: Buffers | None = None) -> Any:
        """Make this part of a batch from rows by column, in memory of ``buffers`` if given.

        Returns:
            An array of shape (rows, *row_shape), vectors side by side. A list with one entry per
            row if the column is text, bytes or ragged.
        """
        if self.image is not None:
            return self._pixels(self.image, taken, buffers)
        if self.single and not self.columns[0].is_fixed:
            return self._of_ragged(taken[self.columns[0].name])
        if self.single:
            return self._converted(taken[self.columns[0].name].values, buffers)
        values = _side_by_side([taken[column.name].values for column in self.columns], self.dtype)
        return self._converted(values, buffers)

    @property
    def decodes(self) -> bool:
        """Whether images are decoded for each batch."""
        return self.image is not None and not self.image.cache

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the pixels of one row that are decoded for each batch."""
        return math.prod(self.image.shape) if self.image is not None and self.decodes else 0

    @property
    def stage(self) -> str:
        """What is done to its rows, in the profile of a run."""
        return f"decode {self.image_name}" if self.decodes else "convert"

    def _pixels(self, image: Image, taken: Mapping[str, Rows], buffers: Buffers | None) -> Array:
        if image.cache:
            pixels = taken[self.image_name].values
        else:
            pixels = decode_rows(image, self.image_name, taken, buffers)
        pixels = self._converted(pixels, buffers)
        # A view: copying 64 x 64 images to the other layout took three times as long as the gather.
        return pixels.transpose(0, 3, 1, 2) if self.layout == "CHW" else pixels

    def _converted(self, values: Array, buffers: Buffers | None) -> Array:
        if not self.dtype or values.dtype == self.dtype:
            return values
        if buffers is None:
            return values.astype(self.dtype)
        converted = buffers.get(len(values), values.shape[1:], self.dtype)
        np.copyto(converted, values, casting="unsafe")
        return converted

    def _of_ragged(self, rows: Rows) -> Any:
        column = self.columns[0]
        if column.kind == "list" and self.pad is not None:
            return _padded(rows, self.pad, self.length, self.dtype or column.dtype)
        if column.kind == "list":
            return rows.cut(rows.values.astype(self.dtype or rows.values.dtype, copy=False))
        cells = rows.cut(rows.values.tobytes())
        if column.kind == "object":
            lists = [_decode_lists(cell) for cell in cells]
            if self.pad is None:
                return lists
            dtype, levels = self.dtype or column.dtype, len(column.shape)
            return _padded_lists(lists, self.pad, self.length or _longest(lists, levels), dtype)
        return cells if column.kind == "bytes" else [cell.decode() for cell in cells]


def _side_by_side(parts: Sequence[Array], dtype: str) -> Array:
    """Columns as one matrix: a view if they are neighbours in one matrix, otherwise a copy.

    The copy has the ``dtype``, or NumPy's common type if it is empty.
    """
    matrices = [part[:, None] if part.ndim == 1 else part.reshape(len(part), -1) for part in parts]
    first, last = matrices[0], matrices[-1]
    base = first.base
    if base is not None and all(m.base is base and m.dtype == first.dtype for m in matrices):
        item = first.itemsize
        at = [matrix.__array_interface__["data"][0] for matrix in matrices]
        widths = [matrix.shape[1] * item for matrix in matrices]
        if all(b == a + w for a, b, w in zip(at, at[1:], widths, strict=False)):
            columns = (at[-1] - at[0]) // item + last.shape[1]
            shape, strides = (len(first), columns), (first.strides[0], item)
            return np.lib.stride_tricks.as_strided(first, shape, strides)
    return np.concatenate(matrices, axis=1, dtype=dtype or None, casting="unsafe")


def _padded(rows: Rows, pad: float, length: int | None, dtype: str) -> Array:
    """Ragged rows as a matrix of shape (rows, length), filled up with ``pad``."""
    assert rows.lengths is not None  # noqa: S101 - it is ragged
    width = int(rows.lengths.max(initial=0)) if length is None else length
    padded = np.full((len(rows.lengths), width), pad, dtype)
    is_value = np.arange(width) < rows.lengths[:, None]
    if length is None or not len(rows.lengths) or rows.lengths.max() <= width:
        padded[is_value] = rows.values
    else:
        begins = np.cumsum(rows.lengths) - rows.lengths
        padded[is_value] = rows.values[(begins[:, None] + np.arange(width))[is_value]]
    return padded


def _longest(lists: Sequence[Any], levels: int) -> tuple[int, ...]:
    """The longest length at each level of some lists of lists."""
    sizes: list[int] = []
    for _ in range(levels):
        sizes.append(max(map(len, lists), default=0))
        lists = [entry for each in lists for entry in each]
    return tuple(sizes)


def _padded_lists(lists: Sequence[Any], pad: float, sizes: tuple[int, ...], dtype: str) -> Array:
    """Lists of lists as an array of shape (rows, *sizes), filled up with ``pad``."""
    padded = np.full((len(lists), *sizes), pad, dtype)

    def fill(target: Array, entries: Sequence[Any]) -> None:
        if target.ndim == 1:
            part = entries[: len(target)]
            target[: len(part)] = part
            return
        for inner, entry in zip(target, entries, strict=False):
            fill(inner, entry)

    for row, entries in zip(padded, lists, strict=True):
        fill(row, entries)
    return padded


def names_of(available: Columns, options: FeedOptions) -> list[str]:
    """The columns that a batch needs, in the dataset's order.

    Raises:
        DataError: the data lack a column, or a column cannot become a tensor.
        TypeError: ``columns`` is neither a list of names nor a mapping.
        ValueError: ``columns`` is empty.
    """
    wanted = _parts(available, options).values()
    flat = flat_names(wanted)
    images = options.images or {}
    chosen = {
        column
        for name in flat
        for column in (
            _image_columns(name, images[name], available)
            if name in images
            else [column.name for column in available.find(name)]
        )
    }
    # Values of a map's keys come behind.
    return [name for name in available if name in chosen] + sorted(chosen - set(available))


def flat_names(parts: Iterable[str | Sequence[str]]) -> list[str]:
    """The columns of some parts, each of which is a column or columns side by side."""
    return [name for part in parts for name in ([part] if isinstance(part, str) else part)]


def _image_columns(name: str, image: Image, available: Columns) -> list[str]:
    """The columns with the pixels of cached images, or with encoded images."""
    return [name] if image.cache else image_columns(name, available)


def _parts(available: Columns, options: FeedOptions) -> Mapping[str, str | Sequence[str]]:
    """The column or columns of each part of a batch, by the part's name."""
    wanted, images = options.columns, options.images or {}
    if isinstance(wanted, Mapping):
        for name, columns in wanted.items():
            if not isinstance(columns, str):
                _check_names(columns, f"columns={{{name!r}: ...}}")
        if not wanted:
            raise ValueError("columns is empty: name at least one column")
        return wanted
    if wanted is not None:
        _check_names(wanted, "columns")
    else:
        heads = tuple(f"{name}." for name in images)
        others = [
            name for name in available.all() if name not in images and not name.startswith(heads)
        ]
        wanted = [*others, *images]
    return {name: name for name in wanted}


def _check_names(names: object, what: str) -> None:
    """Check that columns are named in an order, which must be the same on all ranks."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} must be a list of column names, not {names!r}")
    if not names:
        raise ValueError(f"{what} is empty: name at least one column")


def fields_of(available: Columns, options: FeedOptions) -> list[Field]:
    """The parts of a batch, of a dataset's columns.

    Raises:
        DataError: there is no such column or part, or columns cannot lie side by side.
        TypeError: ``columns`` is neither a list of names nor a mapping.
        ValueError: ``columns`` is empty.
    """
    images = options.images or {}
    parts = _parts(available, options)
    for option, given in (("dtypes", options.dtypes), ("pad_ragged", options.pad_ragged)):
        for name in given if isinstance(given, Mapping) else ():
            if name not in parts:
                raise DataError(
                    f"{option} names {name!r}, which is not a part of the batch: the parts are "
                    f"{', '.join(parts)}"
                )
    for name, image in images.items():
        if name not in parts.values():
            _image_columns(name, image, available)  # raises if there are no images of that name
            raise DataError(
                f"images names the column {name!r}, which is not a part of the batch by itself: "
                f"add it, columns={{..., {name!r}: {name!r}}}"
            )
    return [
        _image_field(name, available, wanted, images[wanted], options)
        if isinstance(wanted, str) and wanted in images
        else _field(name, available, wanted, options)
        for name, wanted in parts.items()
    ]


def _image_field(
    name: str, available: Columns, wanted: str, image: Image, options: FeedOptions
) -> Field:
    columns = tuple(available[column] for column in _image_columns(wanted, image, available))
    # One type for all numbers does not count for pixels.
    dtype = "" if isinstance(options.dtypes, str) else options.dtype_of(name)
    layout = options.layout_of(image)
    return Field(name, columns, True, dtype=dtype, image=image, image_name=wanted, layout=layout)


def _field(
    name: str, available: Columns, wanted: str | Sequence[str], options: FeedOptions
) -> Field:
    single = isinstance(wanted, str) and wanted in available
    names = [wanted] if isinstance(wanted, str) else wanted
    columns = tuple(column for each in names for column in available.find(each))
    if not single and (odd := [column.name for column in columns if not column.is_fixed]):
        raise DataError(
            f"part {name!r} cannot hold {', '.join(map(repr, odd))} beside other columns: text, "
            f"bytes and ragged lists must be parts by themselves, {{{odd[0]!r}: {odd[0]!r}}}"
        )
    dtype = _dtype(name, columns, options)
    filler = (options.pad_ragged or {}).get(name)
    value, length = filler if isinstance(filler, tuple) else (filler, None)
    if value is not None:
        if columns[0].is_ragged_text:
            raise DataError(
                f"pad_ragged names {name!r}, whose lists hold text or bytes: only lists of numbers "
                "are filled up. transform= gets them as lists, and may return arrays"
            )
        _check_pad(name, value, dtype or columns[0].dtype)
    if columns[0].kind == "object" and length is not None:
        _check_sizes(name, value, length, len(columns[0].shape))
    return Field(name, columns, single, dtype, value, length)


def _dtype(name: str, columns: Sequence[Column], options: FeedOptions) -> str:
    """The type to convert a part to; empty keeps it."""
    dtype = options.dtype_of(name)
    if columns[0].kind in ("text", "bytes") or columns[0].is_ragged_text:
        if dtype and not isinstance(options.dtypes, str):  # one type for all counts for numbers
            raise DataError(
                f"dtypes names {name!r}, which is {columns[0].kind}: only numbers have a type to "
                "convert"
            )
        return ""
    if not dtype and np.result_type(*(column.dtype for column in columns)) == np.float64:
        dtype = options.float64_as
    return dtype


def _check_sizes(name: str, value: object, length: object, levels: int) -> None:
    if not isinstance(length, tuple) or len(length) != levels:
        example = ", ".join(["8"] * levels)
        raise DataError(
            f"pad_ragged={{{name!r}: ({value!r}, {length!r})}} does not fit {name!r}, which has "
            f"lists in {levels} levels: give a length for each, ({value!r}, ({example}))"
        )


def _check_pad(name: str, value: object, dtype: str) -> None:
    fits = isinstance(value, int | float | np.number) and (
        np.dtype(dtype).kind not in "iu" or float(value).is_integer()
    )
    if not fits:
        raise DataError(
            f"pad_ragged={{{name!r}: {value!r}}} does not fit {dtype}: give a number that fits, or "
            f"convert the column to another type: dtypes={{{name!r}: 'float32'}}"
        )
