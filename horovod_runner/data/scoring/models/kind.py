"""What all kinds of models have in common; and the kind of a plain function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import cloudpickle

from horovod_runner.common.by_value import by_value
from horovod_runner.data.feed.options import Framework

Parts: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[[Parts], Any]


class ModelKind(Protocol):
    """How one kind of model is kept in a file; pickled to Spark's Python workers."""

    @property
    def framework(self) -> Framework:
        """For whom the inputs are made: torch gets images in layout "CHW", for example."""

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Write a model to a new file."""

    def load(self, path: Path, device: str) -> Call:
        """Read the model onto "cpu" or "cuda:1"; returns what computes the outputs for a batch."""


class Recognized(NamedTuple):
    """A model whose kind is known already; `predict` accepts it in place of the model."""

    kind: ModelKind
    model: Any


@dataclass(frozen=True)
class FunctionKind:
    """A function from a dict of arrays to an array, a tuple or a dict of arrays."""

    framework: Framework = "numpy"

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Pickle the function, with what it captured."""
        with path.open("xb") as file, by_value(ship_modules):
            cloudpickle.dump(model, file, protocol=5)

    def load(self, path: Path, device: str) -> Call:
        """Unpickle the function."""
        with path.open("rb") as file:
            function: Call = cloudpickle.load(file)
        return function
