"""Options of a feed: one frozen object, from the methods of Shard to the code where they act."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np

from horovod_runner.data.feed.order import LastBatch
from horovod_runner.data.pack.images import Image, ImageLayout

if TYPE_CHECKING:
    import torch

Columns: TypeAlias = Mapping[str, str | Sequence[str]] | Sequence[str]
Dtypes: TypeAlias = Mapping[str, str] | str
PadRagged: TypeAlias = Mapping[str, float | tuple[float, int]]
Transform: TypeAlias = Callable[[Any], Any]
Framework: TypeAlias = Literal["numpy", "torch", "tensorflow"]
#: Name of the part that ``sample_weights`` adds to a batch.
WEIGHT: Final = "weight"


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """Arguments of one of Shard's methods, which documents them.

    A new option is a parameter of those methods, a field here, and a line of code where it acts.

    Args:
        framework: for whom the batches are made. Torch and TensorFlow get float32 for float64, and
            torch gets images in layout "CHW", unless the other options say otherwise.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    framework: Framework
    columns: Columns | None = None
    batch_size: int = 1
    shuffle: bool = False
    seed: int = 0
    last_batch: LastBatch = "pad"
    dtypes: Dtypes | None = None
    pad_ragged: PadRagged | None = None
    images: Mapping[str, Image] | None = None
    sample_weights: bool = False
    transform: Transform | None = None
    device: torch.device | str | None = None
    prefetch: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int | np.integer):
            raise TypeError(f"batch_size must be a whole number, not {self.batch_size!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {self.batch_size}")
        if self.last_batch not in get_args(LastBatch):
            raise ValueError(f"last_batch must be 'pad' or 'drop', not {self.last_batch!r}")
        if not isinstance(self.pad_ragged, Mapping | None):
            raise TypeError(
                f"pad_ragged must map parts to numbers, {{'tokens': 0}}, not {self.pad_ragged!r}"
            )
        object.__setattr__(self, "dtypes", _checked(self.dtypes))

    @classmethod
    def of(cls, framework: Framework, arguments: Mapping[str, Any]) -> FeedOptions:
        """Options from the ``locals()`` of a method, on its first line."""
        given = {name: value for name, value in arguments.items() if name != "self"}
        return cls(framework=framework, **given)

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


def _checked(dtypes: Dtypes | None) -> Dtypes | None:
    if isinstance(dtypes, Mapping):
        return {part: _dtype_name(dtype) for part, dtype in dtypes.items()}
    return None if dtypes is None else _dtype_name(dtypes)


def _dtype_name(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise TypeError(f"dtypes must be NumPy types such as 'float32', not {dtype!r}") from None
