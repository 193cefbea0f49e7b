"""Reusable aligned memory for gathered rows."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

from horovod_runner.data.pack.columns import Array

_MAX_BUFFERS = 6  # two in use, two waiting and two being filled
_ALIGNMENT = 64
_UNUSED = 2  # references to a buffer that is not in use, as sys.getrefcount counts them


class Buffers:
    """Memory that is reused once no array or tensor refers to it.

    The kernel hands out fresh memory page by page, which takes longer than a gather. Buffers are
    aligned to 64 bytes, which TensorFlow takes without a copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], str], list[npt.NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def get(self, rows: int, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialized array of shape (rows, *row_shape)."""
        type_ = np.dtype(dtype)
        size = rows * int(np.prod(row_shape)) * type_.itemsize
        with self._lock:
            buffer = _unused(self._kept.setdefault((row_shape, type_.str), []), size)
            start = -buffer.ctypes.data % _ALIGNMENT
            return buffer[start : start + size].view(type_).reshape(rows, *row_shape)


def _unused(kept: list[npt.NDArray[np.uint8]], size: int) -> npt.NDArray[np.uint8]:
    for number in range(len(kept)):
        # Only the list and this call refer to it. A part of it, in an array or a tensor, would too.
        if len(kept[number]) >= size + _ALIGNMENT and sys.getrefcount(kept[number]) == _UNUSED:
            return kept[number]
    made = np.empty(size + _ALIGNMENT, np.uint8)
    if len(kept) < _MAX_BUFFERS:
        kept.append(made)
    return made
