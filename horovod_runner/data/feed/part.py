"""Part: some of the rows of a dataset, to train with or to validate with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from horovod_runner.data.feed.order import RowNumbers, permute

# Rows of a large dataset are chosen in blocks, which are read together from disk.
_SMALL_ROWS = 1 << 16
_BLOCK_ROWS = 128


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a dataset: whole blocks, in the order of the dataset."""

    blocks: RowNumbers  # their numbers, ascending
    block_rows: int  # the dataset's last block may have fewer
    rows: int

    @classmethod
    def where(cls, chosen: npt.NDArray[np.bool_]) -> Part:
        """The rows of a mask with one value for each row."""
        numbers = np.flatnonzero(chosen)
        return cls(numbers, 1, len(numbers))

    def numbers(self, places: RowNumbers) -> RowNumbers:
        """The dataset's row numbers of the rows at some places of the part."""
        if not self.rows:  # a rank without rows takes part with one that does not count
            return np.zeros_like(places)
        block, within = np.divmod(places, self.block_rows)
        numbers: RowNumbers = self.blocks[block] * self.block_rows + within
        return numbers


def divide(rows: int, fraction: float, seed: int) -> tuple[Part, Part]:
    """Divide rows at random: those that are left, and a fraction of them.

    The division depends on the arguments alone. With more than 65,536 rows whole blocks of 128
    neighbouring rows are chosen.
    """
    size = 1 if rows <= _SMALL_ROWS else _BLOCK_ROWS
    full = rows // size  # an incomplete block is not chosen
    count = round(full * fraction)
    order = permute(np.arange(full), full, repr((seed, rows, "part")).encode())
    is_chosen = np.zeros(-(-rows // size), bool)
    is_chosen[order[:count]] = True
    chosen, left = np.flatnonzero(is_chosen), np.flatnonzero(~is_chosen)
    return Part(left, size, rows - count * size), Part(chosen, size, count * size)


def check_validation(validation: float | str) -> None:
    """Check the argument of `Shard.split`, which lists the errors."""
    if isinstance(validation, bool) or not isinstance(validation, float | str):
        raise TypeError(
            f"validation must be a fraction such as 0.2, or the name of a column, not "
            f"{validation!r}"
        )
    if isinstance(validation, float) and not 0 < validation < 1:
        raise ValueError(f"validation must be between 0 and 1, not {validation}")
