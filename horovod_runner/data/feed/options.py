"""Options of a feed: one frozen object, from the methods of Shard to the code where they act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, get_args

import numpy as np

from horovod_runner.data.feed.order import LastBatch
from horovod_runner.data.pack.images import Image, ImageLayout

if TYPE_CHECKING:
    import torch

Columns: TypeAlias = Mapping[str, str | Sequence[str]] | Sequence[str]
Dtypes: TypeAlias = Mapping[str, str] | str
PadRagged: TypeAlias = Mapping[str, float | tuple[float, int | tuple[int, ...]]]
Transform: TypeAlias = Callable[[Any], Any]
Framework: TypeAlias = Literal["numpy", "torch", "tensorflow"]
#: Arguments of other feeds and of earlier versions of this one, with their names here.
ALIASES: Final[Mapping[str, str]] = {
    "last": "last_batch",
    "drop_last": "last_batch='drop'",
    "drop_remainder": "last_batch='drop'",
    "pad": "pad_ragged",
    **dict.fromkeys(("weights", "sample_weight", "sample_weight_col"), "sample_weights"),
    **dict.fromkeys(("dtype", "types"), "dtypes"),
    **dict.fromkeys(("batch", "local_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("global_batch_size", "total_batch_size"), "global_batch"),
    **dict.fromkeys(("cols", "features", "schema_fields", "feature_columns"), "columns"),
    **dict.fromkeys(("shuffle_rows", "shuffle_row_groups", "shuffle_buffer_size"), "shuffle"),
    "random_seed": "seed",
    **dict.fromkeys(("transform_spec", "transform_fn", "collate_fn", "map_fn"), "transform"),
    **dict.fromkeys(("prefetch_factor", "prefetch_batches", "num_prefetch"), "prefetch"),
}
#: Arguments that a method lacks because its result has them: how to write them there.
OF_LOADER: Final[Mapping[str, str]] = {
    "batch_size": "DataLoader(dataset, batch_size=...)",
    "shuffle": "DataLoader(dataset, shuffle=...)",
    "prefetch": "DataLoader(dataset, prefetch_factor=...)",
}
OF_TF_DATASET: Final[Mapping[str, str]] = {
    "transform": "to_tf(...).map(...)",
    "prefetch": "to_tf(...).prefetch(...)",
}
#: Name of the part that ``sample_weights`` adds to a batch.
WEIGHT: Final = "weight"


class RowArguments(TypedDict, total=False):
    """Arguments of all methods of :class:`Shard`: what becomes of the rows.

    Attributes:
        last_batch: "pad" fills the last batch with rows that were in the epoch before; the feed's
            ``real`` counts the other rows. "drop" leaves out the rows that do not fill a batch on
            every rank. "short" gives the last batch the rows that are left, so each row comes once;
            only with ``global_batch``. None is "short" with ``global_batch``, and otherwise "pad".
        dtypes: NumPy types to convert numbers to, by part, or one type for all parts but images.
            None keeps the types in :meth:`Shard.batches`; elsewhere float64 becomes float32.
        pad_ragged: for ragged columns, by part: a number that fills up short rows, to the longest
            of the batch; or (number, length), which also cuts long ones. For lists of lists the
            length is a tuple, with one for each level.
        images: for columns of images: what they become, by column.
    """

    last_batch: LastBatch | None
    dtypes: Dtypes | None
    pad_ragged: PadRagged | None
    images: Mapping[str, Image] | None


class BatchArguments(RowArguments, total=False):
    """Arguments of the methods of :class:`Shard` that make batches, beside :class:`RowArguments`.

    Attributes:
        global_batch: rows per step over all ranks, instead of ``batch_size``. Each rank has its
            part of them; parts differ by one row at most. Steps and their rows are then the same
            with any number of ranks, and a saved state can be resumed with another one. The feed's
            ``weight`` is the factor by which this rank's loss counts. A rank whose part is empty
            gets one row, and its weight is 0.
        shuffle: shuffle the rows, differently in each epoch.
        seed: seed of the shuffling; the same on all ranks.
        sample_weights: add a part "weight" at the end, of shape (batch_size,): 1.0 for each row,
            and 0.0 for padding. Keras takes it as sample weights. With ``global_batch`` the weights
            of rows make up for unequal parts, too. None is False, but True in :meth:`Shard.to_tf`
            with ``global_batch``: ``model.fit`` is exact with them, and without them it is not.
    """

    global_batch: int | None
    shuffle: bool
    seed: int
    sample_weights: bool | None


class FeedArguments(BatchArguments, total=False):
    """Arguments of :meth:`Shard.batches` and ``to_torch``, beside :class:`BatchArguments`.

    Attributes:
        transform: called with each batch as a dict of NumPy arrays, in the thread that prepares it;
            what it returns replaces the batch. In ``to_torch`` the arrays have the types and shapes
            of the tensors already.
        prefetch: how many chunks of batches, of about 3 MB each, are prepared ahead.
    """

    transform: Transform | None
    prefetch: int


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """Arguments of one of Shard's methods, with their defaults.

    A new option is a key above or a parameter of a method, a field here, and a line where it acts.

    Args:
        framework: for whom the batches are made. Torch and TensorFlow get float32 for float64, and
            torch gets images in layout "CHW", unless the other options say otherwise.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    framework: Framework
    columns: Columns | None = None
    batch_size: int | None = None
    global_batch: int | None = None
    shuffle: bool = False
    seed: int = 0
    last_batch: LastBatch | None = None
    dtypes: Dtypes | None = None
    pad_ragged: PadRagged | None = None
    images: Mapping[str, Image] | None = None
    sample_weights: bool | None = None
    transform: Transform | None = None
    device: torch.device | str | None = None
    prefetch: int = 1
    start: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "global_batch"):
            _check_rows(name, getattr(self, name))
        if self.last_batch not in (None, *get_args(LastBatch)):
            raise ValueError(
                f"last_batch must be 'pad', 'drop' or 'short', not {self.last_batch!r}"
            )
        if self.whole and self.last_batch is not None:
            raise ValueError(
                f"last_batch={self.last_batch!r} says how the rows are divided among the ranks, "
                "and with whole=True each rank has all rows: leave it out"
            )
        if self.last_batch == "short" and self.global_batch is None:
            raise ValueError(
                "last_batch='short' gives the ranks different numbers of rows, which only "
                "global_batch weights: pass global_batch instead of batch_size, or use "
                "last_batch='pad'"
            )
        if not isinstance(self.pad_ragged, Mapping | None):
            raise TypeError(
                f"pad_ragged must map parts to numbers, {{'tokens': 0}}, not {self.pad_ragged!r}"
            )
        object.__setattr__(self, "dtypes", _checked(self.dtypes))

    def rows_per_step(self, size: int) -> int:
        """Rows of a step over all ranks.

        Raises:
            TypeError: not exactly one of ``batch_size`` and ``global_batch`` is given.
        """
        if (self.batch_size is None) == (self.global_batch is None):
            raise TypeError(
                "pass either batch_size, the rows of a step on each rank, or global_batch, its "
                f"rows over all ranks: batch_size is {self.batch_size} and global_batch is "
                f"{self.global_batch}"
            )
        return int(self.global_batch or (self.batch_size or 0) * size)

    @property
    def how_last(self) -> LastBatch:
        """What becomes of the last batch, where the user may leave the choice open."""
        return self.last_batch or ("pad" if self.global_batch is None else "short")

    @property
    def has_weights(self) -> bool:
        """Whether batches have the part of sample weights."""
        if self.sample_weights is None:
            return self.framework == "tensorflow" and self.global_batch is not None
        return self.sample_weights

    @property
    def as_tuple(self) -> bool:
        """Whether batches are tuples instead of dicts."""
        return isinstance(self.columns, Mapping)

    def dtype_of(self, part: str) -> str:
        """The type that the user wants for a part of numbers; empty for none."""
        if isinstance(self.dtypes, str):
            return self.dtypes
        return (self.dtypes or {}).get(part, "")

    @property
    def float64_as(self) -> str:
        """What float64 becomes where the user names no type."""
        return "float64" if self.framework == "numpy" else "float32"

    def layout_of(self, image: Image) -> ImageLayout:
        """The layout of an image in a batch."""
        return image.layout or ("CHW" if self.framework == "torch" else "HWC")


def _check_rows(name: str, rows: Any) -> None:
    if rows is None:
        return
    if not isinstance(rows, int | np.integer):
        raise TypeError(f"{name} must be a whole number, not {rows!r}")
    if rows < 1:
        raise ValueError(f"{name} must be 1 or more, not {rows}")


def _checked(dtypes: Dtypes | None) -> Dtypes | None:
    if isinstance(dtypes, Mapping):
        return {part: _dtype_name(dtype) for part, dtype in dtypes.items()}
    return None if dtypes is None else _dtype_name(dtypes)


def _dtype_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise TypeError(f"dtypes must be NumPy types such as 'float32', not {dtype!r}") from None
