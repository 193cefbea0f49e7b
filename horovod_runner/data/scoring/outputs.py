"""The outputs of a model: named results become Arrow arrays of the columns' types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from horovod_runner.errors import DataError, PredictionError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

#: What a user may give: a name, names, or names with Spark's types (None: from a first batch).
OutputSpec: TypeAlias = "str | Sequence[str] | Mapping[str, str | DataType | None]"

# Spark's name of each type of numbers, as Arrow has it.
_ARROW: Final[Mapping[str, pa.DataType]] = {
    "float": pa.float32(),
    "double": pa.float64(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
}
_SYNONYMS: Final = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
_OF_NUMPY: Final = {
    "float16": "float",
    "float32": "float",
    "float64": "double",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "bigint",
    "bool": "boolean",
}


@dataclass(frozen=True)
class OutputType:
    """Type of one output column."""

    element: str  # Spark's name of the innermost type
    depth: int = 0  # how many arrays are around it: 0 for one value per row

    @classmethod
    def parse(cls, given: str | DataType) -> OutputType:
        """Read a type as the user gives it, ``"float"`` or ``"array<float>"``.

        Raises:
            ValueError: a model's output cannot have this type.
        """
        text = given if isinstance(given, str) else given.simpleString()
        element, depth = text.lower().replace(" ", ""), 0
        while match := re.fullmatch(r"array<(.*)>", element):
            element, depth = match[1], depth + 1
        element = _SYNONYMS.get(element, element)
        if element not in _ARROW:
            raise ValueError(
                f"an output cannot have the type {text!r}: the types are {', '.join(_ARROW)}, and "
                "arrays of them, 'array<float>'"
            )
        return cls(element, depth)

    @classmethod
    def of(cls, values: Any) -> OutputType:
        """The type of a column with these values. One number per row makes no array column."""
        if not isinstance(values, np.ndarray):
            first = next((value for value in values if value is not None), None)
            if isinstance(first, np.ndarray):
                return cls(cls.of(first).element, first.ndim)
            if isinstance(first, str | bytes):
                return cls("string" if isinstance(first, str) else "binary")
            raise PredictionError(
                f"the model returned a list of {type(first).__name__}: an output must be an array "
                "of numbers, or a list with one text or one array per row"
            )
        depth = values.ndim - 1
        if values.shape[1:] == (1,):
            depth = 0
        if values.dtype.kind in "US":
            return cls("string" if values.dtype.kind == "U" else "binary", depth)
        element = _OF_NUMPY.get(values.dtype.name)
        if element is None:
            raise PredictionError(
                f"the model returned values of type {values.dtype}, for which Spark has no type: "
                "convert them, or give the column's type, output={'p': 'float'}"
            )
        return cls(element, depth)

    @property
    def ddl(self) -> str:
        """The type in Spark's words."""
        return "array<" * self.depth + self.element + ">" * self.depth

    @property
    def arrow(self) -> pa.DataType:
        """The type in Arrow's words."""
        type_ = _ARROW[self.element]
        for _ in range(self.depth):
            type_ = pa.list_(type_)
        return type_

    def to_arrow(self, name: str, values: Any) -> pa.Array:
        """Convert the rows of one output, an array of shape (rows, ...) or a list of rows."""
        if isinstance(values, np.ndarray) and self.depth == 0 and values.shape[1:] == (1,):
            values = values.reshape(len(values))
        try:
            if not isinstance(values, np.ndarray) or values.dtype.kind in "USO":
                return pa.array(list(values), self.arrow)
            if values.ndim - 1 != self.depth:
                raise ValueError(f"one row has the shape {values.shape[1:]}")
            inner = _ARROW[self.element]
            flat = np.ascontiguousarray(values).reshape(-1)
            array = pa.array(flat.astype(inner.to_pandas_dtype(), copy=False), inner)
            for width in reversed(values.shape[1:]):
                count = len(array) // width if width else int(np.prod(values.shape[:-1]))
                offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
                array = pa.ListArray.from_arrays(offsets, array)
        except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
            raise PredictionError(
                f"output {name!r} is {self.ddl}, and the model returned values that do not fit: "
                f"{error}. Give the type of what it returns, output={{{name!r}: 'array<float>'}}"
            ) from error
        return array


#: The types of the outputs by name; None until a first batch has shown one. Where a model returns a
#: dict, these are also the names of its entries.
Outputs: TypeAlias = Mapping[str, OutputType | None]


def parse_outputs(given: OutputSpec) -> Outputs:
    """The output columns that a user wants.

    Raises:
        TypeError: it is neither text, nor a list of texts, nor a mapping.
        ValueError: it is empty, a type is unknown, or a name comes twice.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Mapping | Sequence):
        raise TypeError(f"output must be a name, names, or a dict of names, not {given!r}")
    names = list(given)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"output must name at least one column, not {given!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"output names a column twice: {', '.join(names)}")
    types = given if isinstance(given, Mapping) else dict.fromkeys(names)
    return {
        name: None if type_ is None else OutputType.parse(type_) for name, type_ in types.items()
    }


def given_types(outputs: Outputs) -> dict[str, OutputType] | None:
    """The types of the outputs; None if a first batch has to show one of them."""
    known = {name: type_ for name, type_ in outputs.items() if type_ is not None}
    return known if len(known) == len(outputs) else None


def types_of(outputs: Outputs, values: Mapping[str, Any]) -> dict[str, OutputType]:
    """The types of the outputs; those that are not given are those of a first batch's values."""
    return {name: type_ or OutputType.of(values[name]) for name, type_ in outputs.items()}


def named(result: Any, outputs: Iterable[str], rows: int) -> dict[str, Any]:
    """The model's results for a batch by the names of the outputs.

    A result is an array or tensor, a tuple of them, a mapping, or a pandas DataFrame.

    Returns:
        For each output an array of shape (rows, ...), or a list with one entry per row.
    """
    names = list(outputs)
    if hasattr(result, "iloc") and hasattr(result, "columns") and not _is_matrix(result, names):
        result = {str(name): result.iloc[:, at] for at, name in enumerate(result.columns)}
    if isinstance(result, Mapping):
        values = _by_name(result, names)
    elif isinstance(result, tuple) or (isinstance(result, list) and _is_of_arrays(result, rows)):
        if len(result) != len(names):
            raise PredictionError(
                f"the model returned {len(result)} outputs, and output names {len(names)}: "
                f"{', '.join(names)}. Name each, output=['a', 'b', ...]"
            )
        values = dict(zip(names, result, strict=True))
    elif len(names) == 1:
        values = {names[0]: result}
    else:
        raise PredictionError(
            f"the model returned one {type(result).__name__}, and output names {len(names)}: "
            f"{', '.join(names)}"
        )
    return {name: _checked(name, as_numpy(value), rows) for name, value in values.items()}


def _is_matrix(frame: Any, names: Sequence[str]) -> bool:
    """Whether the columns of a pandas DataFrame are numbers of one output, side by side."""
    is_named = len(names) > 1 or names[0] in frame.columns
    return not is_named and frame.to_numpy().dtype != object


def _is_of_arrays(result: list[Any], rows: int) -> bool:
    """Whether a list holds outputs, and not one text or array for each row."""
    return len(result) != rows and all(hasattr(value, "shape") for value in result)


def _by_name(result: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    missing = [name for name in names if name not in result]
    if not missing:
        return {name: result[name] for name in names}
    if len(result) == len(names) == 1:
        return {names[0]: next(iter(result.values()))}
    raise PredictionError(
        f"the model returned the outputs {', '.join(map(str, result))}, and none is called "
        f"{', '.join(map(repr, missing))}: name those that you want, output=[...]"
    )


def as_numpy(value: Any) -> Any:
    """A tensor of any framework as an array; lists stay, and texts or arrays become lists."""
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
        return [np.asarray(cell) if isinstance(cell, list | tuple) else cell for cell in value]
    if isinstance(value, np.ndarray | list):
        return value
    if hasattr(value, "detach"):  # torch
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy has no such type
            value = value.float()
        return value.numpy()
    cells: Any = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    if cells.dtype == object and hasattr(value, "isna"):  # pandas, where a missing text is NaN
        cells = np.where(value.isna(), None, cells)
    return as_numpy(cells)


def _checked(name: str, values: Any, rows: int) -> Any:
    count = len(values) if isinstance(values, list) or np.ndim(values) else None
    if count != rows:
        returned = "a single value" if count is None else f"{count} rows"
        raise PredictionError(
            f"the model returned {returned} of {name!r} for a batch of {rows} rows: it must return "
            "one row for each, in their order"
        )
    return values


def check_free(outputs: Iterable[str], names: Sequence[str]) -> None:
    """Check that no output would replace a column; raises DataError."""
    for output in outputs:
        if output in names:
            raise DataError(
                f"there is already a column {output!r}: give another name, output='{output}_2', "
                "or leave that column out of the DataFrame"
            )
