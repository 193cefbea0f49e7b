"""Finds objects from outside ``main`` that it changes: a rank has copies, the driver keeps its own.

history = []
def main():
    history.append(train())   # the driver's list stays empty
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from horovod_runner.worker.checks import notes


class Captured:
    """The lists, dicts, sets and torch modules that a function uses from outside."""

    def __init__(self, function: Any) -> None:
        sizes = ((name, value, _size(value)) for name, value in names_used(function))
        self._before = [known for known in sizes if known[2] is not None]

    def warn(self) -> None:
        """Send a note about those that have changed; not about a model, if files were saved."""
        changed = [
            f"`{name}`"
            for name, value, size in self._before
            if _size(value) != size and not (is_model(value) and notes.count("file"))
        ]
        if changed:
            notes.mistake(
                "captured",
                f"main changed {', '.join(changed)} and returned nothing. Each rank has a copy of "
                "what main uses from outside, so the driver's is as before. Return what the driver "
                "needs from main (of a model its state_dict), or call save_checkpoint.",
            )


def names_used(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables from outside that a function uses, with their values."""
    function = getattr(function, "func", function)  # of functools.partial
    if not isinstance(function, types.FunctionType):
        return
    if function.__module__.startswith("horovod_runner."):
        return  # it runs a script, or an estimator
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        if cell != types.CellType():  # an empty one
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def is_model(value: Any) -> bool:
    """Whether a value is a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _size(value: Any) -> int | None:
    """What grows when an object is changed; None for objects of other types."""
    if type(value) in (list, dict, set):
        return len(value)
    if is_model(value):
        return int(sum(parameter._version for parameter in value.parameters()))
    return None
