"""Encoded images become arrays of one size: JPEGs by simplejpeg if it is there, else by Pillow."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from horovod_runner.data.columns import Array
from horovod_runner.errors import DataError

_JPEG = b"\xff\xd8\xff"
_CHANNELS = {"RGB": 3, "GRAY": 1}


@dataclass(frozen=True)
class Image:
    """What a column of encoded images becomes: uint8 of shape (rows, height, width, channels).

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

        def work(part: range) -> None:
            for number in part:
                self._decode_into(found[number], encoded[number], f"row {number} of {name!r}")

        threads = min(_threads(), max(1, len(encoded) // 8))
        if threads == 1:
            work(range(len(encoded)))
        else:
            parts = [range(first, len(encoded), threads) for first in range(threads)]
            for _ in _pool().map(work, parts):
                pass
        return found

    def _decode_into(self, place: Array, encoded: Any, what: str) -> None:
        simplejpeg = _simplejpeg()
        data = memoryview(encoded)
        if simplejpeg is not None and bytes(data[:3]) == _JPEG:
            try:
                image = simplejpeg.decode_jpeg(
                    data,
                    colorspace=self.mode,
                    min_height=self.height,
                    min_width=self.width,
                )
            except ValueError as error:
                raise DataError(f"{what} is no whole JPEG image: {error}") from error
            if image.shape == self.shape:
                place[...] = image
                return
            self._resize_into(place, image)
            return
        from PIL import Image as Pillow

        try:
            with Pillow.open(io.BytesIO(data)) as opened:
                image = opened.convert("RGB" if self.mode == "RGB" else "L")
                if image.size != (self.width, self.height):
                    image = image.resize((self.width, self.height), Pillow.Resampling.BILINEAR)
                place[...] = np.asarray(image).reshape(self.shape)
        except OSError as error:
            raise DataError(f"{what} is no whole image: {error}") from error

    def _resize_into(self, place: Array, image: Array) -> None:
        from PIL import Image as Pillow

        flat = image if self.mode == "RGB" else image[..., 0]
        resized = Pillow.fromarray(flat).resize(
            (self.width, self.height), Pillow.Resampling.BILINEAR
        )
        place[...] = np.asarray(resized).reshape(self.shape)

    def from_spark(self, rows: Sequence[Any], sizes: Array, name: str) -> Array:
        """Images in Spark's own schema: rows of blue, green and red bytes (OpenCV's order).

        Args:
            rows: the field ``data``.
            sizes: height, width and nChannels, of shape (rows, 3).
            name: of the column.
        """
        found = np.empty((len(rows), *self.shape), np.uint8)
        for number, (data, (height, width, channels)) in enumerate(
            zip(rows, sizes.tolist(), strict=True)
        ):
            if len(data) != height * width * channels or channels not in (1, 3, 4):
                raise DataError(
                    f"row {number} of {name!r} has {len(data)} bytes for {height} x {width} pixels "
                    f"of {channels} channels"
                )
            pixels = np.frombuffer(data, np.uint8).reshape(height, width, channels)
            pixels = pixels[..., 2::-1] if channels >= 3 else np.repeat(pixels, 3, axis=2)
            if self.mode == "GRAY":  # ITU-R 601, as Pillow does it
                pixels = (pixels @ np.array([0.299, 0.587, 0.114])).round()[..., None]
            pixels = np.ascontiguousarray(pixels, np.uint8)
            if pixels.shape == self.shape:
                found[number] = pixels
            else:
                self._resize_into(found[number], pixels)
        return found


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
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="horovod_runner-images")
