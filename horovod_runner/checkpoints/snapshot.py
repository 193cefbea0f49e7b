"""Copies a training state in memory, so that it can be written while the training continues.

    dict with torch tensors     -> torch
    dict of arrays and values   -> arrays; TensorFlow tensors become NumPy arrays
    Keras model                 -> keras
    bytes                       -> bytes
    path of a folder            -> folder

See :mod:`horovod_runner.checkpoints.formats` for the files.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from horovod_runner.checkpoints import formats
from horovod_runner.checkpoints.keras_copy import KerasCopier, is_keras_model
from horovod_runner.common.files import unnamed_file
from horovod_runner.wire.marker import Kind

#: Values that are stored as they are.
PLAIN: Final = (type(None), bool, int, float, str, bytes)
_COPY_BYTES: Final = 1 << 20


class Snapshot(NamedTuple):
    """A copy of a state, not yet written.

    It is written to a new file whose name ends with the suffix of its kind.
    """

    kind: Kind
    write: Callable[[Path], object]


class Copier:
    """Copies states, one at a time, into buffers that it reuses.

    The first copy of a large state takes longer: its memory has to be allocated.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Any] = {}
        self._used: set[tuple[Any, ...]] = set()
        self._keras = KerasCopier()

    def copy(self, state: Any) -> Snapshot:
        """Copy a state. This overwrites the previous copy: write that one first.

        Raises:
            TypeError: the state holds a value that cannot be stored.
        """
        if isinstance(state, (bytes, bytearray, memoryview)):
            data = bytes(state)
            return Snapshot("bytes", lambda path: path.write_bytes(data))
        if isinstance(state, (str, os.PathLike)):
            return _pack_folder(Path(state))
        if is_keras_model(state):
            return Snapshot("keras", self._keras.copy(state))
        self._used = set()
        copied, with_torch = map_state(state, self._copy_tensor, self._copy_array)
        for key in self._buffers.keys() - self._used:  # the state no longer has them
            del self._buffers[key]
        if with_torch:
            return Snapshot("torch", lambda path: formats.write_torch(path, copied))
        return Snapshot("arrays", lambda path: formats.write_arrays(path, copied))

    def _copy_tensor(self, tensor: Any, where: str) -> Any:
        torch = sys.modules["torch"]
        if not is_dense(tensor):
            return tensor.cpu().clone()
        pinned = tensor.is_cuda  # the GPU writes to pinned memory directly
        buffer = self._buffer(
            ("torch", where, tuple(tensor.shape), tensor.dtype),
            lambda: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned),
        )
        buffer.copy_(tensor)
        return buffer

    def _copy_array(self, array: Any, where: str) -> Any:
        numpy = sys.modules["numpy"]
        if isinstance(array, numpy.generic):
            return array
        key = ("numpy", where, array.shape, array.dtype)
        buffer = self._buffer(key, lambda: numpy.empty(array.shape, array.dtype))
        numpy.copyto(buffer, array)
        return buffer

    def _buffer(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        self._used.add(key)
        if key not in self._buffers:
            self._buffers[key] = make()
        return self._buffers[key]


def _pack_folder(folder: Path) -> Snapshot:
    # To disk, not to memory: a folder may have any size.
    packed = unnamed_file("folder")
    try:
        pack_folder(folder, packed)
        packed.flush()  # here: a full disk is this one, not the one of the checkpoint
    except BaseException:
        packed.close()
        raise

    def write(path: Path) -> None:
        with packed, path.open("wb") as file:
            packed.seek(0)
            shutil.copyfileobj(packed, file, _COPY_BYTES)

    return Snapshot("folder", write)


def pack_folder(folder: Path, file: Any) -> None:
    """Write a folder's files to a tar file.

    Raises:
        TypeError: there is no such folder.
    """
    if not folder.is_dir():
        raise TypeError(
            f"{str(folder)!r} is not a folder: a checkpoint's state is a dict, a Keras model, "
            "bytes, or the path of an existing folder"
        )
    # What links lead to, and not the links: it may be outside of the folder, as in a snapshot of
    # Hugging Face's.
    with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
        tar.add(folder, arcname=".")


def map_state(
    state: Any,
    map_tensor: Callable[[Any, str], Any],
    map_array: Callable[[Any, str], Any],
    *,
    sharded: bool = False,
) -> tuple[Any, bool]:
    """Rebuild a state with other tensors and arrays.

    Args:
        state: nested dicts, lists and tuples.
        map_tensor: maps a torch tensor and its place in the state. It is called once for tied
            weights, which stay tied.
        map_array: maps a NumPy array, scalar or TensorFlow tensor (as an array), and its place.
        sharded: whether a rank's part of a tensor (DTensor) is mapped as well.

    Returns:
        The new state, and whether it has torch tensors.

    Raises:
        TypeError: the state holds a value that cannot be stored.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a checkpoint's state is a dict, a Keras model, bytes, or the path of a folder, "
            f"not {type(state).__qualname__}. Give a torch module's state_dict(), in a dict of "
            "everything that a restart needs."
        )
    torch = sys.modules.get("torch")
    with_torch = torch is not None and _holds(state, torch.Tensor)
    seen: dict[tuple[Any, ...], Any] = {}

    def map_leaf(value: Any, where: str) -> Any:
        if type(value) in PLAIN:
            return value
        if torch is not None and with_torch:
            if isinstance(value, torch.Tensor):
                return tensor(value.detach(), where)
            if isinstance(value, (torch.dtype, torch.device)):
                return value
        if isinstance(value, type):
            raise _not_storable(value, where)
        if type(value).__module__.startswith("tensorflow.") and hasattr(value, "numpy"):
            value = value.numpy()  # a copy, unless the tensor is immutable
            if type(value) in PLAIN:
                return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
            if value.dtype.hasobject:
                raise _not_storable(value, where, f" of dtype {value.dtype}")
            if isinstance(value, numpy.ma.MaskedArray):
                raise _not_storable(value, where)
            if isinstance(value, numpy.ndarray):
                value = numpy.asarray(value)  # no reader knows other classes, such as memmap
            return map_array(value, where)
        raise _not_storable(value, where)

    def tensor(value: Any, where: str) -> Any:
        if hasattr(value, "full_tensor"):
            if sharded:
                return map_tensor(value, where)
            raise _not_storable(value, where, ", one rank's part of a tensor")
        if not is_dense(value) or not value.numel():
            return map_tensor(value, where)
        # Tied weights stay tied, and are stored once. A tensor and its conjugate share memory, too.
        views = (value.is_conj(), value.is_neg(), value.device)
        identity = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, *views)
        if identity not in seen:
            seen[identity] = map_tensor(value, where)
        return seen[identity]

    return _map_leaves(state, "", map_leaf), with_torch


def is_dense(tensor: Any) -> bool:
    """Whether a torch tensor is an array of plain numbers: not sparse, quantized or nested."""
    strided = tensor.layout is sys.modules["torch"].strided
    return bool(strided and not tensor.is_quantized and not tensor.is_nested)


def _holds(value: Any, kind: Any) -> bool:
    """Whether a nested container holds an instance of a type."""
    if isinstance(value, Mapping):
        return any(_holds(item, kind) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(item, kind) for item in value)
    return isinstance(value, kind)


def _map_leaves(value: Any, where: str, leaf: Callable[[Any, str], Any]) -> Any:
    """Rebuild nested dicts, lists and tuples with other leaves.

    ``where`` is the place in the state: "['model'][0]".
    """
    kind = type(value)
    if isinstance(value, Mapping) and not hasattr(value, "shape"):
        mapped: dict[Any, Any] = OrderedDict() if kind is OrderedDict else {}
        for key, item in value.items():
            if type(key) not in PLAIN:
                raise TypeError(
                    f"state{where} has a key of type {type(key).__qualname__} ({key!r:.80}): keys "
                    "of a checkpoint are strings or numbers"
                )
            mapped[key] = _map_leaves(item, f"{where}[{key!r}]", leaf)
        if hasattr(value, "_metadata"):  # of torch's state_dict: the versions of the modules
            mapped._metadata = value._metadata  # type: ignore[attr-defined]
        return mapped
    if kind is list:
        return [_map_leaves(item, f"{where}[{at}]", leaf) for at, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # torch.Size is a tuple
        return tuple(_map_leaves(item, f"{where}[{at}]", leaf) for at, item in enumerate(value))
    return leaf(value, where)


def _not_storable(value: Any, where: str, details: str = "") -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = ": give its state_dict()" if hasattr(value, "state_dict") else ""
    if hasattr(value, "full_tensor"):
        advice = ": use save_checkpoint(..., sharded=True), or gather it (full_tensor)"
    elif hasattr(value, "filled"):  # a masked array
        advice = ": give its data and its mask"
    return TypeError(
        f"state{where} has the type {kind}{details}, which a checkpoint cannot hold{advice}. It "
        "can hold tensors, NumPy arrays, numbers, strings, bytes and None, in dicts, lists and "
        "tuples."
    )
