"""Image decoding: JPEG, PNG and Spark's image schema to uint8 arrays of one size.

JPEGs are decoded by simplejpeg if it is installed, all other formats by Pillow.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import numpy as np

from horovod_runner.data.pack.buffers import Buffers
from horovod_runner.data.pack.columns import Array, Columns, Rows
from horovod_runner.errors import DataError

ImageLayout: TypeAlias = Literal["HWC", "CHW"]
_JPEG = b"\xff\xd8\xff"
_CHANNELS = {"RGB": 3, "GRAY": 1}
_SPARK_FIELDS = ("data", "height", "width", "nChannels")
_PILLOW_MODES = {"RGB": "RGB", "GRAY": "L"}


@dataclass(frozen=True)
class Image:
    """What a column of images becomes: uint8 pixels from 0 to 255.

    The column holds encoded images (JPEG, PNG and the other formats that Pillow reads), or Spark's
    image schema. A batch has the shape (rows, height, width, channels) in layout "HWC", and (rows,
    channels, height, width) in layout "CHW".

    Args:
        height: in pixels; images of another size are resized, without keeping their proportions.
        width: in pixels.
        mode: "RGB" (3 channels) or "GRAY" (1 channel).
        cache: keep the decoded images on local disk, height x width x channels bytes per image.
            Nothing is decoded from the second epoch on.
        layout: "HWC" or "CHW". None: "CHW" in ``to_torch`` and ``to_torch_dataset``, and "HWC" in
            ``batches`` and ``to_tf``. Torch and NumPy get "CHW" without a copy: tensors are in
            torch's ``channels_last`` memory format.

    Raises:
        ValueError: ``height`` or ``width`` is below 1, or ``mode`` or ``layout`` is unknown.
    """

    height: int
    width: int
    mode: Literal["RGB", "GRAY"] = "RGB"
    cache: bool = False
    layout: Literal["HWC", "CHW"] | None = None

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"height and width must be 1 or more, not {self.height}, {self.width}")
        if self.mode not in _CHANNELS:
            raise ValueError(f"mode must be 'RGB' or 'GRAY', not {self.mode!r}")
        if self.layout not in (None, "HWC", "CHW"):
            raise ValueError(f"layout must be 'HWC', 'CHW' or None, not {self.layout!r}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a decoded image: (height, width, channels)."""
        return self.height, self.width, _CHANNELS[self.mode]

    def decode(self, encoded: Sequence[Any], name: str, buffers: Buffers | None = None) -> Array:
        """Decode images of a column, on as many threads as this rank has cores.

        Returns:
            uint8 array of shape (rows, height, width, channels).

        Raises:
            DataError: a cell is not an image; the message names its row.
        """
        pixels = self._memory(len(encoded), buffers)

        def keep(number: int, image: Array) -> None:
            pixels[number] = self._resized(image)

        _decode_all(encoded, name, _decoder(self.mode, self.height, self.width), keep)
        return pixels

    def from_spark(
        self, cells: Sequence[Any], sizes: Array, name: str, buffers: Buffers | None = None
    ) -> Array:
        """Convert images of a column in Spark's schema.

        Args:
            cells: the field ``data`` of each row: blue, green and red as in OpenCV.
            sizes: height, width and nChannels, shape (rows, 3).
            name: name of the column, for error messages.
            buffers: memory for the pixels; None allocates new memory.

        Returns:
            uint8 array of shape (rows, height, width, channels).

        Raises:
            DataError: an image has another number of bytes than its size requires.
        """
        pixels = self._memory(len(cells), buffers)

        def convert(number: int) -> None:
            data, (height, width, channels) = cells[number], sizes[number].tolist()
            if len(data) != height * width * channels or channels not in (1, 3, 4):
                raise DataError(
                    f"row {number} of {name!r} has {len(data)} bytes for {height} x {width} pixels "
                    f"of {channels} channels: the image is damaged, or its type is not 8-bit with "
                    "1, 3 or 4 channels"
                )
            image = np.frombuffer(data, np.uint8).reshape(height, width, channels)
            image = image[..., 2::-1] if channels >= 3 else np.repeat(image, 3, axis=2)
            if self.mode == "GRAY":  # the weights of ITU-R 601, as in Pillow
                image = (image @ np.array([0.299, 0.587, 0.114])).round()[..., None]
            pixels[number] = self._resized(np.ascontiguousarray(image, np.uint8))

        _on_threads(convert, len(cells))
        return pixels

    def _memory(self, count: int, buffers: Buffers | None) -> Array:
        if buffers is None:
            return np.empty((count, *self.shape), np.uint8)
        return buffers.get(count, self.shape, np.uint8)

    def _resized(self, image: Array) -> Array:
        if image.shape == self.shape:
            return image
        pillow = _pillow()
        flat = image if self.mode == "RGB" else image[..., 0]
        size = (self.width, self.height)
        resized = pillow.fromarray(flat).resize(size, pillow.Resampling.BILINEAR)
        return np.asarray(resized).reshape(self.shape)


def image_columns(name: str, columns: Columns) -> list[str]:
    """The columns that hold the images called ``name``: one, or the fields of Spark's schema."""
    if name in columns and columns[name].kind == "bytes":
        return [name]
    fields = [f"{name}.{field}" for field in _SPARK_FIELDS]
    if all(field in columns for field in fields):
        return fields
    for each in (name, *fields):
        if each in columns.refused:
            raise DataError(columns.refused[each])
    what = (
        f"this one holds {columns[name].kind} values"
        if name in columns
        else f"the columns are {', '.join(columns)}"
    )
    raise DataError(
        f"column {name!r} holds no images: images are encoded, in a binary column, or in Spark's "
        f"image schema; {what}"
    )


def decode_rows(
    image: Image, name: str, rows: Mapping[str, Rows], buffers: Buffers | None = None
) -> Array:
    """Decode the images of some rows, into memory of ``buffers`` if they are given.

    Returns:
        uint8 array of shape (rows, height, width, channels).
    """
    if name in rows:
        return image.decode(rows[name].cut(rows[name].values.data), name, buffers)
    data, *sizes = (rows[f"{name}.{field}"] for field in _SPARK_FIELDS)
    shapes = np.stack([size.values for size in sizes], axis=1)
    return image.from_spark(data.cut(data.values.data), shapes, name, buffers)


def decode_unresized(
    encoded: Sequence[Any], shape: tuple[int, ...], dtype: str, name: str
) -> Array:
    """Decode images of a column that all have one shape, (height, width) or with channels."""
    pixels = np.empty((len(encoded), *shape), dtype)
    mode = "RGB" if shape[2:] == (3,) and dtype == "uint8" else None

    def keep(number: int, image: Array) -> None:
        if image.shape not in {shape, (*shape, 1)}:
            raise DataError(
                f"row {number} of {name!r} is an image of shape {image.shape}, and the dataset's "
                f"schema says {shape}: write the images in one size, or leave the column out"
            )
        pixels[number] = image.reshape(shape)

    _decode_all(encoded, name, _decoder(mode), keep)
    return pixels


def _decode_all(
    encoded: Sequence[Any],
    name: str,
    decode: Callable[[memoryview], Array],
    keep: Callable[[int, Array], None],
) -> None:
    """Decode images on threads, and ``keep`` each with its number."""

    def work(number: int) -> None:
        try:
            image = decode(memoryview(encoded[number]))
        except (DataError, MemoryError):
            raise
        except Exception as error:  # each format's decoder has its own
            raise DataError(
                f"row {number} of {name!r} is not a complete image, or too large: {error}. Leave "
                "that row out, or replace the image"
            ) from error
        keep(number, image)

    _on_threads(work, len(encoded))


def _decoder(
    mode: str | None, min_height: int = 0, min_width: int = 0
) -> Callable[[memoryview], Array]:
    """What decodes an image to shape (height, width, channels).

    In its own mode if ``mode`` is None; a JPEG to any size that is not below ``min_...``.
    """
    by_pillow = partial(_by_pillow, mode and _PILLOW_MODES[mode])
    simplejpeg = _simplejpeg()
    if simplejpeg is None or mode is None:
        return by_pillow
    sizes = {"min_height": min_height, "min_width": min_width}
    of_jpeg = partial(simplejpeg.decode_jpeg, colorspace=mode, **sizes)

    def decode(data: memoryview) -> Array:
        pixels: Array = of_jpeg(data) if data[:3] == _JPEG else by_pillow(data)
        return pixels

    return decode


def _by_pillow(mode: str | None, data: memoryview) -> Array:
    with _pillow().open(io.BytesIO(data)) as opened:
        if mode is not None and _is_deep_gray(opened):  # convert() would make all of it white
            eight_bits = (np.asarray(opened) >> 8).astype(np.uint8)
            image = np.asarray(_pillow().fromarray(eight_bits).convert(mode))
        else:
            image = np.asarray(opened if mode is None else opened.convert(mode))
    return image.reshape(*image.shape[:2], -1)


def _is_deep_gray(opened: Any) -> bool:
    """Whether an image has one channel of 16 bits; of others Pillow itself takes the upper 8."""
    # Older releases of Pillow open such a PNG with 32 bits.
    return opened.mode.startswith("I;16") or (opened.mode, opened.format) == ("I", "PNG")


def _on_threads(work: Callable[[int], object], count: int) -> None:
    """Call ``work`` with the numbers 0 to ``count`` - 1; decoders release Python's global lock."""
    threads = min(_threads(), max(1, count // 8))

    def part(first: int) -> None:
        for number in range(first, count, threads):
            work(number)

    if threads == 1:
        part(0)
        return
    for done in [_pool().submit(part, first) for first in range(threads)]:
        done.result()


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
            f"decoding images requires Pillow ({error}): pip install 'horovod_runner[images]'"
        ) from error
    return Pillow


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="horovod_runner-images")


# The threads are not in a fork, such as a DataLoader's worker, which would wait for them.
os.register_at_fork(after_in_child=_pool.cache_clear)
