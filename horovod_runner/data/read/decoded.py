"""Cached images: a reader that decodes images once, when they are packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from horovod_runner.data.pack.columns import Column, Columns, Rows
from horovod_runner.data.pack.images import Image, decode_rows, image_columns
from horovod_runner.data.pack.layout import Chunk, Layout, pack
from horovod_runner.data.read.readers import Reader

_ROWS = 1 << 8  # decoded at a time: decoded images are large


@dataclass(frozen=True)
class Decoded:
    """A reader with pixels (height, width, channels) in place of another's encoded images."""

    reader: Reader
    images: Mapping[str, Image]  # by column

    @property
    def units(self) -> list[int]:
        """Rows of each unit, a part that can be read by itself."""
        return self.reader.units

    @property
    def fingerprint(self) -> str:
        """Identifies the data."""
        return self.reader.fingerprint

    @property
    def columns(self) -> Columns:
        """The columns, by name.

        An encoded image is a struct column, whose fields the other reader lists as columns
        ("photo.data"): the column of pixels replaces them.
        """
        prefixes = tuple(f"{name}." for name in self.images)
        known = self.reader.columns
        others = {name: column for name, column in known.items() if not name.startswith(prefixes)}
        pixels = {
            name: Column(name, "vector", "uint8", image.shape)
            for name, image in self.images.items()
        }
        return Columns({**others, **pixels}, known.refused, known.maps)

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed."""
        others = self.reader.settle([name for name in names if name not in self.images])
        settled = self.columns.changed(others)
        return [column for name in names for column in settled.find(name)]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """Yield the rows of a unit, packed."""
        known = self.reader.columns
        encoded = [known[part] for name in self.images for part in image_columns(name, known)]
        others = [column for column in layout.columns if column.name not in self.images]
        inner = Layout([*others, *encoded], layout.units)
        for chunk in self.reader.chunks(unit, inner):
            columns = inner.split(chunk)
            for start in range(0, chunk.rows, _ROWS):
                count = min(_ROWS, chunk.rows - start)
                part = {name: rows.part(start, start + count) for name, rows in columns.items()}
                yield pack(layout, count, lambda column: self._rows(column, part))  # noqa: B023

    def _rows(self, column: Column, part: Mapping[str, Rows]) -> Rows:
        image = self.images.get(column.name)
        return part[column.name] if image is None else Rows(decode_rows(image, column.name, part))
