"""The file formats of checkpoints: writes states to files and reads them back.

    torch     .pt      torch.save's format; read with weights_only
    arrays    .npz     NumPy arrays and plain values
    keras     .keras   Keras's format, optimizer included
    bytes     .bin     the bytes
    folder    .tar     a folder's files

No reader uses plain ``pickle``, so a checkpoint runs no code.
"""

from __future__ import annotations

import atexit
import io
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from horovod_runner.common.files import is_full, unpack, write_problem
from horovod_runner.common.text import bytes_text
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.problems import FULL_TEMPORARY
from horovod_runner.host.scratch import scratch_folder
from horovod_runner.wire.marker import Kind

_TREE: Final = "tree.msgpack"
_decode_tree: Final = msgspec.msgpack.Decoder().decode


def write_torch(path: Path, state: Any) -> None:
    """Write a state with torch tensors to a new file.

    Raises:
        OSError: torch could not write it; the disk is probably full.
    """
    try:
        sys.modules["torch"].save(state, path)
    except RuntimeError as error:  # it does not contain the system's error
        free = bytes_text(shutil.disk_usage(path.parent).free)
        reason = str(error).partition("\n")[0]
        raise OSError(f"torch.save failed with {free} free in {path.parent}: {reason}") from error


def write_arrays(path: Path, state: Any) -> None:
    """Write nested containers of NumPy arrays and plain values to a new zip file.

    The containers and plain values are one MessagePack entry; every array is an entry in NumPy's
    format. The file is written from its start to its end: a mounted store may allow nothing else.
    """
    import numpy

    npy: Any = numpy.lib.format
    arrays: dict[str, Any] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, dict):
            return ["dict", [[key, encode(item)] for key, item in value.items()]]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [encode(item) for item in value]]
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            name, array = f"a{len(arrays)}", numpy.asarray(value)
            # NumPy would store types of other packages as raw bytes.
            foreign = is_foreign(array.dtype)
            arrays[name] = array.view(f"u{array.itemsize}") if foreign else array
            kind = "scalar" if isinstance(value, numpy.generic) else "array"
            return [kind, name, array.dtype.name]
        if type(value) is int and not -(2**63) <= value < 2**63:
            return ["int", str(value)]
        return ["", value]

    tree = msgspec.msgpack.encode(encode(state))
    with path.open("wb") as file, zipfile.ZipFile(_Sequential(file), "w") as archive:
        archive.writestr(_TREE, tree)
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                npy.write_array(entry, array, allow_pickle=False)


class _Sequential(io.RawIOBase):
    """A file that does not say that it can seek: zipfile then writes sizes behind the entries."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def writable(self) -> bool:
        """See :class:`io.RawIOBase`."""
        return True

    def write(self, data: Any) -> int:
        """See :class:`io.RawIOBase`."""
        return self._file.write(data)


def read(kind: Kind, path: Path) -> Any:
    """Read a state from a file.

    Returns:
        The state: tensors are on the CPU; a folder is the path of a temporary copy, which is
        removed at the end of this process.

    Raises:
        CheckpointError: the framework that wrote the file is not installed here, or the disk has
            no room for a copy of a folder's files.
    """
    try:
        return _READERS[kind](path)
    except OSError as error:
        if not is_full(error):
            raise
        raise CheckpointError(
            f"the checkpoint {path.name} needs room for a copy: "
            f"{write_problem(error, scratch_folder())}. {FULL_TEMPORARY}"
        ) from error
    except ImportError as error:
        raise CheckpointError(
            f"the checkpoint {path.name} cannot be read here: {error}. It was written in the "
            f"{kind} format: install the package that is missing."
        ) from error


def is_foreign(dtype: Any) -> bool:
    """Whether a type of NumPy's arrays is one of another package, such as bfloat16."""
    return bool(dtype.type.__module__ != "numpy")


def foreign_type(name: str) -> Any:
    """A type of another package by its name.

    Raises:
        ImportError: ml_dtypes, which has all of them, is not installed here.
    """
    import ml_dtypes
    import numpy

    return numpy.dtype(getattr(ml_dtypes, name))


def _read_torch(path: Path) -> Any:
    import torch

    with numpy_allowed(torch):
        return torch.load(path, map_location="cpu", weights_only=True)


def numpy_allowed(torch: Any) -> Any:
    """A context in which ``weights_only`` accepts NumPy arrays and numbers: they hold no code."""
    try:
        import numpy
    except ImportError:
        return nullcontext()
    package = "_core" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "core"
    multiarray = import_module(f"numpy.{package}.multiarray")
    codes = [*numpy.typecodes["AllFloat"], *numpy.typecodes["AllInteger"], *"?USFDV"]
    dtypes = {type(numpy.dtype(code)) for code in [*codes, "M8[s]", "m8[s]"]}
    allowed = [numpy.ndarray, numpy.dtype, numpy.record, *dtypes, *_foreign_types()]
    # Under both names: NumPy 2 renamed the package.
    for name in ("_reconstruct", "scalar"):
        function = getattr(multiarray, name)
        allowed += [(function, f"numpy.{home}.multiarray.{name}") for home in ("core", "_core")]
    return torch.serialization.safe_globals(allowed)


def _foreign_types() -> Iterator[type]:
    """The types of ml_dtypes, and those of their dtypes; none where it is not installed."""
    try:
        import ml_dtypes
        import numpy
    except ImportError:
        return
    for kind in vars(ml_dtypes).values():
        if isinstance(kind, type) and issubclass(kind, numpy.generic):
            yield kind
            yield type(numpy.dtype(kind))


def _read_arrays(path: Path) -> Any:
    import numpy

    npy: Any = numpy.lib.format
    with zipfile.ZipFile(path) as archive:

        def read_array(name: str, dtype: str) -> Any:
            with archive.open(f"{name}.npy") as file:
                array = npy.read_array(file, allow_pickle=False)
            if array.dtype.name != dtype and array.dtype.kind == "u":
                return array.view(foreign_type(dtype))
            return array

        def decode(encoded: Any) -> Any:
            kind, value, *rest = encoded
            match kind:
                case "dict":
                    return {key: decode(item) for key, item in value}
                case "list":
                    return [decode(item) for item in value]
                case "tuple":
                    return tuple(decode(item) for item in value)
                case "array":
                    return read_array(value, rest[0])
                case "scalar":
                    return read_array(value, rest[0])[()]
            return int(value) if kind == "int" else value

        return decode(_decode_tree(archive.read(_TREE)))


def _read_keras(path: Path) -> Any:
    import keras

    return keras.models.load_model(path)  # in safe mode, its default


def _read_folder(path: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=scratch_folder()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(path, folder)
    return folder


_READERS: Final[Mapping[Kind, Callable[[Path], Any]]] = {
    "torch": _read_torch,
    "arrays": _read_arrays,
    "keras": _read_keras,
    "bytes": lambda path: path.read_bytes(),
    "folder": _read_folder,
}
