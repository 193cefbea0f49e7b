"""Encoded images become arrays: JPEGs by simplejpeg if it is there, else by Pillow."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from horovod_runner.data.columns import Array, Column, Rows
from horovod_runner.errors import DataError

_JPEG = b"\xff\xd8\xff"
_CHANNELS = {"RGB": 3, "GRAY": 1}
_SPARK_FIELDS = ("data", "height", "width", "nChannels")
_MODES = {"RGB": "RGB", "GRAY": "L"}  # as Pillow calls them


@dataclass(frozen=True)
class Image:
    """What a column of images becomes: uint8 of shape (rows, height, width, channels).

    The column holds encoded images (JPEG, PNG and whatever else Pillow reads), or is of Spark's own
    image schema.

    Args:
        height: in pixels; images of another size are resized, without keeping their proportions.
        width: in pixels.
        mode: "RGB" or "GRAY".
        cache: keep the decoded images on local disk, height x width x channels bytes each: from
            the second epoch on nothing is decoded.
    """

    height: int
    width: int
    mode: Literal["RGB", "GRAY"] = "RGB"
    cache: bool = False

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.mode not in _CHANNELS:
            raise ValueError(f"{self}: height and width are 1 or more, mode is 'RGB' or 'GRAY'")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one image."""
        return self.height, self.width, _CHANNELS[self.mode]

    def decode(self, encoded: Sequence[Any], name: str) -> Array:
        """Decode images, on as many threads as this rank has cores.

        Raises:
            DataError: one is no image; says which.
        """
        found = np.empty((len(encoded), *self.shape), np.uint8)

        def work(number: int) -> None:
            what = f"row {number} of {name!r}"
            found[number] = self._fitted(_decode(encoded[number], self.mode, what, self.shape[:2]))

        _on_threads(work, len(encoded))
        return found

    def from_spark(self, pixels: Sequence[Any], sizes: Array, name: str) -> Array:
        """Images in Spark's own schema: rows of blue, green and red bytes (OpenCV's order).

        Args:
            pixels: the field ``data``.
            sizes: height, width and nChannels, of shape (rows, 3).
            name: of the column.

        Raises:
            DataError: one has another number of bytes than its size takes.
        """
        found = np.empty((len(pixels), *self.shape), np.uint8)

        def work(number: int) -> None:
            data, (height, width, channels) = pixels[number], sizes[number].tolist()
            if len(data) != height * width * channels or channels not in (1, 3, 4):
                raise DataError(
                    f"row {number} of {name!r} has {len(data)} bytes for {height} x {width} pixels "
                    f"of {channels} channels"
                )
            image = np.frombuffer(data, np.uint8).reshape(height, width, channels)
            image = image[..., 2::-1] if channels >= 3 else np.repeat(image, 3, axis=2)
            if self.mode == "GRAY":  # ITU-R 601, as Pillow does it
                image = (image @ np.array([0.299, 0.587, 0.114])).round()[..., None]
            found[number] = self._fitted(np.ascontiguousarray(image, np.uint8))

        _on_threads(work, len(pixels))
        return found

    def _fitted(self, image: Array) -> Array:
        if image.shape == self.shape:
            return image
        pillow = _pillow()
        flat = image if self.mode == "RGB" else image[..., 0]
        size = (self.width, self.height)
        resized = pillow.fromarray(flat).resize(size, pillow.Resampling.BILINEAR)
        return np.asarray(resized).reshape(self.shape)


def sources_of(name: str, there: Mapping[str, Column]) -> list[str]:
    """The columns that hold the images which a user calls by one name.

    Raises:
        DataError: there are none.
    """
    if name in there and there[name].kind == "bytes":
        return [name]
    fields = [f"{name}.{field}" for field in _SPARK_FIELDS]
    if all(field in there for field in fields):
        return fields
    what = f"it is {there[name].kind}" if name in there else f"there are {', '.join(there)}"
    raise DataError(
        f"column {name!r} holds no images: they are encoded, as binary, or of Spark's image "
        f"schema; {what}"
    )


def images_of(image: Image, name: str, there: Mapping[str, Rows]) -> Array:
    """The images among the columns of some rows, decoded."""
    if name in there:
        return image.decode(there[name].views(), name)
    data, *sizes = (there[f"{name}.{field}"] for field in _SPARK_FIELDS)
    return image.from_spark(data.views(), np.stack([one.values for one in sizes], axis=1), name)


def decode_as_they_are(
    encoded: Sequence[Any], shape: tuple[int, ...], dtype: str, name: str
) -> Array:
    """Decode images that all have one shape.

    Args:
        encoded: the images.
        shape: of each, (height, width) or (height, width, channels).
        dtype: of their numbers.
        name: of the column.

    Raises:
        DataError: one is no image, or has another shape.
    """
    found = np.empty((len(encoded), *shape), dtype)
    mode = "RGB" if shape[2:] == (3,) and dtype == "uint8" else None

    def work(number: int) -> None:
        what = f"row {number} of {name!r}"
        image = _decode(encoded[number], mode, what)
        if image.shape not in {shape, (*shape, 1)}:
            raise DataError(f"{what} is an image of shape {image.shape}, not {shape}")
        found[number] = image.reshape(shape)

    _on_threads(work, len(encoded))
    return found


def _decode(
    encoded: Any, mode: str | None, what: str, at_least: tuple[int, int] | None = None
) -> Array:
    """One image, of shape (height, width, channels); of any mode it has, if none is asked for."""
    data = memoryview(encoded)
    simplejpeg = _simplejpeg()
    if simplejpeg is not None and mode is not None and bytes(data[:3]) == _JPEG:
        height, width = at_least or (0, 0)
        try:
            found: Array = simplejpeg.decode_jpeg(
                data, colorspace=mode, min_height=height, min_width=width
            )
        except ValueError as error:
            raise DataError(f"{what} is no whole JPEG image: {error}") from error
        return found
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            image = np.asarray(opened if mode is None else opened.convert(_MODES[mode]))
    except OSError as error:
        raise DataError(f"{what} is no whole image: {error}") from error
    return image.reshape(*image.shape[:2], -1)


def _on_threads(work: Callable[[int], None], count: int) -> None:
    """Call something with each number; decoders leave the interpreter to others meanwhile."""
    threads = min(_threads(), max(1, count // 8))
    if threads == 1:
        _each(work, range(count))
        return
    parts = [range(first, count, threads) for first in range(threads)]
    for done in [_pool().submit(_each, work, part) for part in parts]:
        done.result()


def _each(work: Callable[[int], None], numbers: range) -> None:
    for number in numbers:
        work(number)


@cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@cache
def _pillow() -> Any:
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise DataError(
            f"images take Pillow ({error}): pip install 'horovod_runner[images]'"
        ) from error
    return Pillow


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="horovod_runner-images")
