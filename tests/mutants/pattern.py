"""Find a piece of code by its syntax tree, and replace it.

A pattern is Python source: an expression, or one or several consecutive statements. The layout,
comments and redundant parentheses of the code play no role, so that a pattern outlives most edits.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class PatternError(ValueError):
    """A pattern is not Python or does not occur exactly once, or the change makes no sense."""


class Place(NamedTuple):
    """A field of a node, and the index of the first element if it is a list."""

    parent: ast.AST
    field: str
    start: int


def replace(source: str, name: str, old: str, new: str) -> str:
    """Replace the only occurrence of a pattern in a function or class.

    Args:
        source: A module's source.
        name: The function or class, as in a pytest id ("Class::method"). "" is the whole module.
        old: The pattern. It also matches in nested functions.
        new: What replaces it. `pass` deletes statements; `*()` deletes an element of a list.

    Returns:
        The source of the changed module, laid out by `ast.unparse`: it has no comments.

    Raises:
        PatternError: `old` does not occur exactly once, or the change is none or not Python.
    """
    tree = ast.parse(source)
    before, after = _parse(old, new)
    places = [place for scope in _named(tree, name) for place in find(scope, before)]
    if len(places) != 1:
        raise PatternError(f"`old` occurs {len(places)} times")
    if _dumps(before) == _dumps(after):
        raise PatternError("`new` changes nothing")
    _put(places[0], len(before), after)
    changed = ast.unparse(tree)
    try:
        compile(changed, "<mutant>", "exec")
    except SyntaxError as error:
        raise PatternError(f"the change does not compile: {error.msg}") from error
    return changed


def find(scope: ast.AST, nodes: Sequence[ast.AST]) -> Iterator[Place]:
    """Yield the places below a node where copies of these nodes are, one after the other."""
    wanted = _dumps(nodes)
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            there = value if isinstance(value, list) else [value]
            for start in range(len(there) - len(nodes) + 1):
                # The types are compared first: most differ, and a dump takes longer.
                some = there[start : start + len(nodes)]
                if all(map(_same_type, some, nodes)) and _dumps(some) == wanted:
                    yield Place(parent, field, start)


def _parse(old: str, new: str) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return two expressions if both are one, or else statements."""
    before, after = _statements(old), _statements(new)
    if len(before) == len(after) == 1:
        match before[0], after[0]:
            case ast.Expr(one), ast.Expr(other):
                return [one], [other]
    return [*before], [*after]


def _statements(text: str) -> list[ast.stmt]:
    """Parse a pattern. The further lines of an expression are indented, or it is in parentheses."""
    text = textwrap.dedent(text)
    try:
        try:
            found = ast.parse(text).body
        except IndentationError:
            found = ast.parse(f"({text}\n)").body
    except SyntaxError:
        found = []
    if not found:
        raise PatternError(f"this is not Python: {text!r}")
    return found


def _named(tree: ast.Module, name: str) -> list[ast.AST]:
    """Return the definitions of a name: several if it is defined again, as a property's setter."""
    found: list[ast.AST] = [tree]
    for part in filter(None, name.split("::")):
        found = [node for scope in found for node in _definitions(scope) if node.name == part]
    if not found:
        raise PatternError(f"there is no {name}")
    return found


def _definitions(scope: ast.AST) -> Iterator[_Definition]:
    """Yield the functions and classes of a scope, but not those within them."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _Definition):
            yield node
        else:
            yield from _definitions(node)


def _put(place: Place, count: int, nodes: Sequence[ast.AST]) -> None:
    """Replace a number of nodes."""
    value = getattr(place.parent, place.field)
    if isinstance(value, list):
        value[place.start : place.start + count] = nodes
    else:
        setattr(place.parent, place.field, nodes[0])


def _same_type(one: object, other: object) -> bool:
    return type(one) is type(other)


def _dumps(nodes: Sequence[ast.AST]) -> list[str]:
    return [ast.dump(node) for node in nodes]
