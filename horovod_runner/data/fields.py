"""What a batch is made of: columns side by side, turned into one type, filled up where short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_runner.data.columns import Array, Column, Rows
from horovod_runner.data.images import Image, images_of, sources_of
from horovod_runner.errors import DataError

Columns = Mapping[str, str | Sequence[str]] | Sequence[str]
Pad = Mapping[str, float | tuple[float, int]]


@dataclass(frozen=True)
class Field:
    """One part of a batch.

    Attributes:
        name: what it is called in the batch.
        columns: which columns it is made of, side by side.
        single: it is one column by itself, not a list of columns.
        dtype: what the numbers are turned into; empty leaves them as they are.
        pad: what fills up short rows of ragged columns; None leaves them ragged.
        length: to which they are filled up or cut; None: to the longest of the batch.
        image: what encoded images become.
        image_name: what the user calls the column, or the columns, that they are in.
    """

    name: str
    columns: tuple[Column, ...]
    single: bool
    dtype: str = ""
    pad: float | None = None
    length: int | None = None
    image: Image | None = None
    image_name: str = ""

    @property
    def is_uniform(self) -> bool:
        """Whether all batches of as many rows have the same shape."""
        return (
            not self.single
            or self.image is not None
            or self.columns[0].is_fixed
            or (self.columns[0].kind == "list" and self.pad is not None and self.length is not None)
        )

    def of(self, taken: Mapping[str, Rows]) -> Any:
        """Its values for some rows: an array, or a list where the column is text, bytes or ragged.

        Shape (rows,) or (rows, *shape) for a single column, (rows, columns) for several; vectors
        are laid side by side.
        """
        if self.image is not None:
            values = images_of(self.image, self.image_name, taken)
            return values.astype(self.dtype, copy=False) if self.dtype else values
        if self.single and not self.columns[0].is_fixed:
            return self._of_ragged(taken[self.columns[0].name])
        if self.single:
            values = taken[self.columns[0].name].values
        else:
            values = _side_by_side([taken[column.name].values for column in self.columns])
        return values.astype(self.dtype, copy=False) if self.dtype else values

    def _of_ragged(self, rows: Rows) -> Any:
        column = self.columns[0]
        assert rows.lengths is not None  # noqa: S101 - it is ragged
        if column.kind == "list" and self.pad is not None:
            padded = _padded(rows, self.pad, self.length)
            return padded.astype(self.dtype, copy=False) if self.dtype else padded
        ends = np.cumsum(rows.lengths).tolist()
        begins = [0, *ends[:-1]]
        if column.kind == "list":
            values = rows.values.astype(self.dtype or rows.values.dtype, copy=False)
            return [values[a:b] for a, b in zip(begins, ends, strict=True)]
        data = rows.values.tobytes()
        if column.kind == "bytes":
            return [data[a:b] for a, b in zip(begins, ends, strict=True)]
        return [data[a:b].decode() for a, b in zip(begins, ends, strict=True)]


def _side_by_side(parts: Sequence[Array]) -> Array:
    matrices = [part[:, None] if part.ndim == 1 else part.reshape(len(part), -1) for part in parts]
    first, last = matrices[0], matrices[-1]
    base = first.base
    if base is not None and all(one.base is base and one.dtype == first.dtype for one in matrices):
        # Neighbours in one matrix: that part of it, as it is.
        item = first.itemsize
        at = [one.__array_interface__["data"][0] for one in matrices]
        widths = [one.shape[1] * item for one in matrices]
        if all(b == a + w for a, b, w in zip(at, at[1:], widths, strict=False)):
            columns = (at[-1] - at[0]) // item + last.shape[1]
            shape, strides = (len(first), columns), (first.strides[0], item)
            return np.lib.stride_tricks.as_strided(first, shape, strides)
    return np.concatenate(matrices, axis=1)


def _padded(rows: Rows, pad: float, length: int | None) -> Array:
    assert rows.lengths is not None  # noqa: S101 - it is ragged
    width = int(rows.lengths.max(initial=0)) if length is None else length
    found = np.full((len(rows.lengths), width), pad, rows.values.dtype)
    there = np.arange(width) < rows.lengths[:, None]
    if length is None or not len(rows.lengths) or rows.lengths.max() <= width:
        found[there] = rows.values
    else:
        begins = np.cumsum(rows.lengths) - rows.lengths
        found[there] = rows.values[(begins[:, None] + np.arange(width))[there]]
    return found


def names_of(
    there: Mapping[str, Column], wanted: Columns | None, images: Mapping[str, Image]
) -> list[str]:
    """The columns that a user asked for, in the dataset's order.

    Raises:
        DataError: there is no such column.
    """
    asked = list(_parts(there, wanted, images).values())
    flat = [name for one in asked for name in ([one] if isinstance(one, str) else one)]
    chosen = {
        column.name
        for name in flat
        for column in (
            [there[own] for own in sources_of(name, there)]
            if name in images
            else _expand([name], there)
        )
    }
    return [name for name in there if name in chosen]


def _parts(
    there: Mapping[str, Column], wanted: Columns | None, images: Mapping[str, Image]
) -> Mapping[str, str | Sequence[str]]:
    """The parts of a batch by name; where nothing is asked for, all columns.

    Raises:
        TypeError: that is no list of names, and no mapping.
        ValueError: it names nothing.
    """
    if isinstance(wanted, Mapping):
        for name, asked in wanted.items():
            if not isinstance(asked, str):
                _check_names(asked, f"columns={{{name!r}: ...}}")
        if not wanted:
            raise ValueError("columns names no column at all")
        return wanted
    if wanted is not None:
        _check_names(wanted, "columns")
    else:
        heads = tuple(f"{name}." for name in images)
        plain = [name for name in there if name not in images and not name.startswith(heads)]
        wanted = [*plain, *images]
    return {name: name for name in wanted}


def _check_names(names: object, what: str) -> None:
    """See to it that columns are named in an order, which must be the same on all ranks.

    Args:
        names: a list or tuple of text, or else there is an error.
        what: the argument's name.

    Raises:
        TypeError: it is something else.
        ValueError: it names nothing.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} takes a list of names of columns, not {names!r}")
    if not names:
        raise ValueError(f"{what} names no column at all")


def fields_of(
    there: Mapping[str, Column],
    wanted: Columns | None,
    dtypes: Mapping[str, str] | str | None = None,
    pad: Pad | None = None,
    images: Mapping[str, Image] | None = None,
) -> list[Field]:
    """The parts of a batch that a user asked for.

    Args:
        there: the columns, by name.
        wanted: for each part its column or its columns; a list names parts that are one column
            each; None takes all columns so.
        dtypes: NumPy types, by part, or one for all parts that are numbers.
        pad: for parts that are ragged, what they are filled up with, and to which length.
        images: what columns of images become, by column.

    Raises:
        DataError: there is no such column or part, or columns cannot lie side by side.
    """
    images = images or {}
    parts = _parts(there, wanted, images)
    if not isinstance(pad, Mapping | None):
        raise TypeError(f"pad takes a number for each part, {{'tokens': 0}}, not {pad!r}")
    if isinstance(dtypes, Mapping):
        dtypes = {name: _type_name(dtype) for name, dtype in dtypes.items()}
    elif dtypes is not None:
        dtypes = _type_name(dtypes)
    for option, given in (("dtypes", dtypes), ("pad", pad)):
        for name in given if isinstance(given, Mapping) else ():
            if name not in parts:
                raise DataError(f"{option} names {name!r}; the parts are {', '.join(parts)}")
    for name in images:
        if name not in parts.values():
            sources_of(name, there)  # tells what holds no images at all
            raise DataError(
                f"images names the column {name!r}, which is no part by itself: "
                f"columns={{..., {name!r}: {name!r}}}"
            )
    return [
        _image(name, there, asked, images[asked], dtypes)
        if isinstance(asked, str) and asked in images
        else _field(name, there, asked, dtypes, pad or {})
        for name, asked in parts.items()
    ]


def _type_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise TypeError(f"dtypes takes types of NumPy's, as 'float32', not {dtype!r}") from None


def _image(
    name: str,
    there: Mapping[str, Column],
    asked: str,
    image: Image,
    dtypes: Mapping[str, str] | str | None,
) -> Field:
    columns = tuple(there[own] for own in sources_of(asked, there))
    # One type for all numbers is not meant for pixels.
    dtype = "" if isinstance(dtypes, str) or dtypes is None else dtypes.get(name, "")
    return Field(name, columns, single=True, dtype=dtype, image=image, image_name=asked)


def _field(
    name: str,
    there: Mapping[str, Column],
    asked: str | Sequence[str],
    dtypes: Mapping[str, str] | str | None,
    pad: Pad,
) -> Field:
    single = isinstance(asked, str) and asked in there
    columns = _expand([asked] if isinstance(asked, str) else asked, there)
    if not single and (odd := [column.name for column in columns if not column.is_fixed]):
        raise DataError(
            f"part {name!r} cannot hold {', '.join(map(repr, odd))} beside others: text, bytes and "
            f"ragged lists each make a part of their own, {{{odd[0]!r}: {odd[0]!r}}}"
        )
    filler = pad.get(name)
    value, length = filler if isinstance(filler, tuple) else (filler, None)
    dtype = dtypes if isinstance(dtypes, str) else (dtypes or {}).get(name, "")
    if dtype and columns[0].kind in ("text", "bytes"):
        if not isinstance(dtypes, str):  # which is meant for numbers
            raise DataError(
                f"dtypes names {name!r}, which is {columns[0].kind}: only numbers can be turned"
            )
        dtype = ""
    if value is not None:
        _check_pad(name, value, dtype or columns[0].dtype)
    return Field(name, columns, single, dtype, value, length)


def _check_pad(name: str, value: object, dtype: str) -> None:
    fits = isinstance(value, int | float | np.number) and (
        np.dtype(dtype).kind not in "iu" or float(value).is_integer()
    )
    if not fits:
        raise DataError(
            f"pad={{{name!r}: {value!r}}} does not fit {dtype}: give a number that does, or turn "
            f"the column into another type: dtypes={{{name!r}: 'float32'}}"
        )


def _expand(names: Sequence[str], there: Mapping[str, Column]) -> tuple[Column, ...]:
    """The columns of some names, where a struct's name stands for all of its fields."""
    found: list[Column] = []
    for name in names:
        if name in there:
            found.append(there[name])
            continue
        fields = [c for own, c in there.items() if own.startswith(f"{name}.")]
        if not fields:
            raise DataError(f"there is no column {name!r}: there are {', '.join(there)}")
        found += fields
    return tuple(found)
