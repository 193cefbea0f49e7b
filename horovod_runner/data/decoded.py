"""A source whose images are decoded while it is packed, and so once instead of in every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod_runner.data.columns import Column, Rows
from horovod_runner.data.images import Image, images_of, sources_of
from horovod_runner.data.store import Chunk, Layout, pack

if TYPE_CHECKING:
    from horovod_runner.data.readers import Reader

_ROWS = 1 << 8  # images are large once they are decoded


@dataclass(frozen=True)
class Decoded:
    """Another reader, with arrays in the place of images.

    Attributes:
        reader: the other one.
        images: what is decoded, by column.
    """

    reader: Reader
    images: Mapping[str, Image]

    @property
    def units(self) -> list[int]:
        """The number of rows of each part that is read by itself."""
        return self.reader.units

    @property
    def fingerprint(self) -> str:
        """Names the data."""
        return self.reader.fingerprint

    @property
    def columns(self) -> dict[str, Column]:
        """What there is, by name."""
        there = self.reader.columns
        heads = tuple(f"{name}." for name in self.images)
        kept = {name: column for name, column in there.items() if not name.startswith(heads)}
        return {
            **kept,
            **{n: Column(n, "vector", "uint8", one.shape) for n, one in self.images.items()},
        }

    def settle(self, names: Sequence[str]) -> list[Column]:
        """Some columns as they are packed."""
        other = self.reader.settle([name for name in names if name not in self.images])
        settled = {**self.columns, **{column.name: column for column in other}}
        return [settled[name] for name in names]

    def chunks(self, unit: int, layout: Layout) -> Iterator[Chunk]:
        """The rows of a part, packed."""
        there = self.reader.columns
        needed = [one for name in self.images for one in sources_of(name, there)]
        other = [column for column in layout.columns if column.name not in self.images]
        inner = Layout([*other, *(there[name] for name in needed)], layout.units)
        for whole in self.reader.chunks(unit, inner):
            apart = inner.apart(whole)
            for start in range(0, whole.rows, _ROWS):
                rows = min(_ROWS, whole.rows - start)
                part = {name: one.part(start, start + rows) for name, one in apart.items()}
                yield pack(layout, rows, lambda column: self._rows(column, part))  # noqa: B023

    def _rows(self, column: Column, part: Mapping[str, Rows]) -> Rows:
        image = self.images.get(column.name)
        return part[column.name] if image is None else Rows(images_of(image, column.name, part))
