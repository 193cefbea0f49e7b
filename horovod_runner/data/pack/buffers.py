"""Reusable aligned memory for gathered rows."""

from __future__ import annotations

import math
import sys
import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from horovod_runner.data.pack.columns import Array

_MAX_BUFFERS = 6  # two in use, two waiting and two being filled
_ALIGNMENT = 64
_UNUSED = 2  # references to a buffer that is not in use, as sys.getrefcount counts them
_Memory: TypeAlias = tuple[npt.NDArray[np.uint8], int]  # and where its aligned part begins


class Buffers:
    """Memory that is reused once no array or tensor refers to it.

    The kernel hands out fresh memory page by page, which takes longer than a gather. Buffers are
    aligned to 64 bytes, which TensorFlow takes without a copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], str], list[_Memory]] = {}
        self._lock = threading.Lock()

    def get(self, rows: int, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialized array of shape (rows, *row_shape)."""
        type_ = np.dtype(dtype)
        size = rows * math.prod(row_shape) * type_.itemsize
        with self._lock:
            memory, start = _unused(self._kept.setdefault((row_shape, type_.str), []), size)
            return np.ndarray((rows, *row_shape), type_, memory, start)


def _unused(kept: list[_Memory], size: int) -> _Memory:
    for number in range(len(kept)):
        # Only its tuple and this call refer to it. An array or a tensor in it would, too.
        unused = sys.getrefcount(kept[number][0]) == _UNUSED
        if unused and len(kept[number][0]) >= size + _ALIGNMENT:
            return kept[number]
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    made = memory, -memory.ctypes.data % _ALIGNMENT
    if len(kept) < _MAX_BUFFERS:
        kept.append(made)
    return made
