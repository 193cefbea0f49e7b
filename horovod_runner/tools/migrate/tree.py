"""Questions to nodes of a tree, matchers, and changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import libcst as cst
import libcst.matchers as m
from libcst.metadata import QualifiedNameProvider

#: Makes the new node of one whose parts have been changed already.
Change: TypeAlias = Callable[[Any], Any]
Changes: TypeAlias = dict[Any, Change]
#: Stands in a line that is removed: libcst would drop an empty line with the comments above it.
REMOVED = (cst.Pass(),)


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all that is in it, in the order of the text."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


# Parts of nodes


def dotted(node: cst.CSTNode | None) -> str:
    """The text of a name with dots; "" if it is something else."""
    if isinstance(node, cst.Name):
        return str(node.value)
    if isinstance(node, cst.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr.value}"
    return ""


def imports_of(node: cst.Import | cst.ImportFrom) -> list[str]:
    """The full names of what an import names; ``module.*`` for all names of a module."""
    module = ""
    if isinstance(node, cst.ImportFrom):
        if node.relative or node.module is None:
            return []
        module = f"{dotted(node.module)}."
    if isinstance(node.names, cst.ImportStar):
        return [f"{module}*"]
    return [f"{module}{dotted(alias.name)}" for alias in node.names]


def argument(call: cst.Call, name: str, position: int | None = None) -> Any:
    """An argument of a call by its keyword, or by its position from 0 on; None without it."""
    for index, arg in enumerate(call.args):
        if arg.star:
            position = None
        if arg.keyword.value == name if arg.keyword else index == position:
            return arg
    return None


def keywords(call: cst.Call) -> list[str]:
    """The keywords of a call."""
    return [arg.keyword.value for arg in call.args if arg.keyword is not None]


def is_value(node: cst.Arg | None, *texts: str) -> bool:
    """Whether an argument is one of these literals or names."""
    value = None if node is None else node.value
    return isinstance(value, cst.Name | cst.Integer | cst.Float) and value.value in texts


def string(node: cst.CSTNode | None) -> str | None:
    """The value of a literal string; None if it is something else."""
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def named(*names: str) -> Any:
    """A matcher for what has one of these full names."""
    return m.MatchMetadataIfTrue(
        QualifiedNameProvider, lambda found: any(each.name in names for each in found)
    )


def ending(*ends: str) -> Any:
    """A matcher for names whose text, with a dot before it, ends with one of these."""
    return m.MatchIfTrue(lambda node: f".{dotted(node)}".endswith(ends))


def method(*names: str) -> Any:
    """A matcher for attributes with one of these names."""
    return m.Attribute(attr=m.Name(m.MatchIfTrue(lambda name: name in names)))


# Changes of one node


def expression(text: str) -> Any:
    """The tree of an expression."""
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError:  # of several lines, which were inside parentheses
        return cst.parse_expression(f"({text})")


def statements(*lines: str) -> list[Any]:
    """The trees of statements; an empty text is an empty line above the next one."""
    trees = []
    for each in cst.parse_module("\n".join([*lines, ""])).body:
        blank = [cst.EmptyLine(indent=False) for _ in each.leading_lines]
        trees.append(each.with_changes(leading_lines=blank))
    return trees


def becomes(text: str) -> Change:
    """Write another expression instead."""
    return lambda _: expression(text)


def with_keyword(name: str) -> Change:
    """Give an argument a keyword."""
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return lambda arg: arg.with_changes(keyword=cst.Name(name), equal=equal)


def without(call: cst.Call, *dropped: cst.Arg) -> Change:
    """Leave out arguments of a call; what stays keeps its line breaks."""
    kept = [index for index, arg in enumerate(call.args) if arg not in dropped]

    def change(call: cst.Call) -> cst.Call:
        args = [call.args[index] for index in kept]
        if args:
            last = call.args[-1]
            space = last.whitespace_after_arg
            args[-1] = args[-1].with_changes(comma=last.comma, whitespace_after_arg=space)
        return call.with_changes(args=args)

    return change


def with_argument(text: str, *, first: bool = False) -> Change:
    """Give a call one more argument."""

    def change(call: cst.Call) -> cst.Call:
        new = cst.ensure_type(expression(f"f({text})"), cst.Call).args
        return call.with_changes(args=[*new, *call.args] if first else [*call.args, *new])

    return change


def before(*lines: str) -> Change:
    """Write lines above a statement, below the comments above it."""

    def change(old: Any) -> Any:
        blank = [cst.EmptyLine(indent=False)] if not lines[-1] else []
        return cst.FlattenSentinel([*instead(*lines)(old), old.with_changes(leading_lines=blank)])

    return change


def after(*lines: str) -> Change:
    """Write lines below a statement."""
    return lambda old: cst.FlattenSentinel([old, *statements(*lines)])


def instead(*lines: str) -> Change:
    """Write lines instead of a statement; the comments above it stay."""

    def change(old: Any) -> Any:
        first, *others = statements(*lines)
        return cst.FlattenSentinel([first.with_changes(leading_lines=old.leading_lines), *others])

    return change
