"""Flattens a state to its leaves by name, "model.0.weight", and puts it together again.

The names and paths are those of torch.distributed.checkpoint, whose paths lack two things, which
are kept beside them: dicts with whole numbers as keys, and empty dicts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: From the state to a leaf: keys of dicts as text, and places in lists.
Path = tuple[str | int, ...]


class Shape(NamedTuple):
    """The containers of a state."""

    paths: dict[str, Path]  # of the leaves, by name
    numbered: list[Path]  # of dicts whose keys are whole numbers
    empty: list[Path]  # of empty dicts


class Leaves(NamedTuple):
    """A flat state: its leaves by name, and the container of each, with its key there."""

    values: dict[str, Any]
    homes: dict[str, tuple[Any, Any]]
    shape: Shape


def flatten(state: Mapping[Any, Any]) -> Leaves:
    """Find the leaves of a state.

    Dicts are taken apart, and lists that hold tensors or dicts. All else is a leaf.

    Raises:
        TypeError: the keys of a dict are neither all text nor all whole numbers.
        ValueError: two leaves have the same name.
    """
    leaves = Leaves({}, {}, Shape({}, [], []))
    _visit(state, (), leaves)
    return leaves


def _visit(container: Any, path: Path, leaves: Leaves) -> None:
    values, homes, shape = leaves
    items: Iterable[tuple[Any, str | int, Any]]
    if isinstance(container, Mapping):
        kinds = {type(key) for key in container}
        if kinds == {int}:
            shape.numbered.append(path)
        elif kinds - {str}:
            raise TypeError(
                f"the dict at {_name(path)!r} of the state has keys of type "
                f"{', '.join(sorted(kind.__name__ for kind in kinds))}: in a sharded checkpoint "
                "they are all text, or all whole numbers"
            )
        if not container:
            shape.empty.append(path)
        items = [(key, str(key), value) for key, value in container.items()]
    else:
        items = [(at, at, value) for at, value in enumerate(container)]
    for key, step, value in items:
        inner = (*path, step)
        if isinstance(value, Mapping) or (isinstance(value, list) and _branches(value)):
            _visit(value, inner, leaves)
            continue
        name = _name(inner)
        if name in values:
            raise ValueError(
                f"two values of the state have the same name {name!r}: leave out dots in keys"
            )
        values[name], homes[name], shape.paths[name] = value, (container, key), inner


def _branches(values: Sequence[Any]) -> bool:
    torch = sys.modules.get("torch")
    return any(
        isinstance(value, Mapping)
        or (torch is not None and isinstance(value, torch.Tensor))
        or (isinstance(value, list) and _branches(value))
        for value in values
    )


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def merge(shapes: Iterable[Shape]) -> Shape:
    """The shape of a state of which each rank knows a part."""
    merged = Shape({}, [], [])
    for paths, numbered, empty in shapes:
        for name, path in paths.items():
            merged.paths.setdefault(name, path)
        merged.numbered.extend(path for path in numbered if path not in merged.numbered)
        merged.empty.extend(path for path in empty if path not in merged.empty)
    return merged


def unflatten(values: Mapping[str, Any], shape: Shape) -> dict[Any, Any]:
    """Put a state together from its leaves."""
    numbered = set(shape.numbered)
    state: dict[Any, Any] = {}
    made: dict[Path, Any] = {(): state}

    def container(path: Path, *, is_list: bool) -> Any:
        if path not in made:
            made[path] = [] if is_list else {}
            put(path, made[path])
        return made[path]

    def put(path: Path, value: Any) -> None:
        above, last = path[:-1], path[-1]
        home = container(above, is_list=isinstance(last, int))
        if isinstance(last, int):
            home.extend([None] * (last + 1 - len(home)))
            home[last] = value
        else:
            home[int(last) if above in numbered else last] = value

    for name, path in shape.paths.items():
        if name in values:
            put(path, values[name])
    for path in shape.empty:
        container(path, is_list=False)
    return state
