"""A parsed text, and what the rules ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias, TypeVar, cast

import libcst as cst
from libcst.metadata import (
    Assignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    ScopeProvider,
)

from horovod_runner.migrate.edits import Edit, Finding

Node = TypeVar("Node", bound=cst.CSTNode)
Unit: TypeAlias = cst.FunctionDef | cst.Module


class Code:
    """A module, with its names resolved.

    Args:
        text: Python code whose lines end with a newline character alone.

    Raises:
        libcst.ParserSyntaxError: it is not Python 3.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._names = wrapper.resolve(QualifiedNameProvider)
        self._scopes = wrapper.resolve(ScopeProvider)
        self._starts = [0]
        for line in text.split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    # Where it is

    def start(self, node: cst.CSTNode) -> int:
        """The first character of a node."""
        place = self._positions[node].start
        start: int = self._starts[place.line - 1] + place.column
        return start

    def end(self, node: cst.CSTNode) -> int:
        """The character behind the last of a node."""
        place = self._positions[node].end
        end: int = self._starts[place.line - 1] + place.column
        return end

    def line(self, node: cst.CSTNode) -> int:
        """The line in which a node begins, from 1 on."""
        return int(self._positions[node].start.line)

    def source(self, node: cst.CSTNode) -> str:
        """The text of a node, with the parentheses around it."""
        left = getattr(node, "lpar", ())
        return self.text[self.start(left[0] if left else node) : self.outer_end(node)]

    def outer_end(self, node: cst.CSTNode) -> int:
        """The character behind a node and the parentheses around it."""
        right = getattr(node, "rpar", ())
        return self.end(right[-1] if right else node)

    # What is around it

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around a node; None for the module."""
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, the nearest first."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def around(self, node: cst.CSTNode, kind: type[Node]) -> Node | None:
        """The nearest node of a kind around a node."""
        return next((n for n in self.above(node) if isinstance(n, kind)), None)

    def statement(self, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
        """The line of statements that a node is in, or is."""
        if isinstance(node, cst.SimpleStatementLine):
            return node
        for outer in self.above(node):
            if isinstance(outer, cst.SimpleStatementLine):
                return outer
            if isinstance(outer, cst.BaseCompoundStatement):
                return None
        return None

    def unit(self, node: cst.CSTNode) -> Unit:
        """The function that a node is in; the module outside all functions."""
        unit: Unit = self.around(node, cst.FunctionDef) or self.module
        return unit

    # What it means

    def names(self, node: cst.CSTNode) -> set[str]:
        """The full names that an expression may have: ``tensorflow.Session`` of ``tf.Session``."""
        found = self._names.get(node, ())
        return {each.name for each in (found() if callable(found) else found)}

    def name(self, node: cst.CSTNode) -> str:
        """The full name of an expression if it has one; otherwise ""."""
        found = self.names(node)
        return next(iter(found)) if len(found) == 1 else min(found, default="")

    def values(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """The expressions that are assigned to a name; [] if it is also bound in another way."""
        if not isinstance(node, cst.Name) or node not in self._scopes:
            return []
        found = []
        scope = self._scopes[node]
        for assignment in scope[node.value] if scope is not None else ():
            if not isinstance(assignment, Assignment):
                return []
            target = self.parent(assignment.node)
            statement = self.parent(target) if isinstance(target, cst.AssignTarget) else None
            if not isinstance(statement, cst.Assign):
                return []
            found.append(statement.value)
        return found

    def assigned(self, call: cst.BaseExpression) -> cst.Name | None:
        """The name that an expression is assigned to, in a statement of its own."""
        statement = self.parent(call)
        if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
            target = statement.targets[0].target
            return target if isinstance(target, cst.Name) else None
        return None

    def is_bound(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a name is visible at a node."""
        scope = self._scopes.get(node)
        return scope is not None and bool(scope[name])

    # Its parts

    @cached_property
    def _nodes(self) -> dict[type[cst.CSTNode], list[cst.CSTNode]]:
        found: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}
        for node in walk(self.module):
            found.setdefault(type(node), []).append(node)
        return found

    @property
    def calls(self) -> list[cst.Call]:
        """All calls, in the order of the text."""
        return self.all(cst.Call)

    def all(self, kind: type[Node], inside: cst.CSTNode | None = None) -> list[Node]:
        """All nodes of a kind, in the order of the text."""
        if inside is None or inside is self.module:
            return cast("list[Node]", self._nodes.get(kind, []))
        return [node for node in walk(inside) if isinstance(node, kind)]

    def calls_of(self, *names: str) -> Iterator[cst.Call]:
        """The calls of something with one of these full names."""
        for call in self.calls:
            if self.names(call.func).intersection(names):
                yield call

    def uses(self, name: str, inside: cst.CSTNode | None = None) -> Iterator[cst.Name]:
        """The places where a variable is meant: no attributes and keywords of its name."""
        for node in self.all(cst.Name, inside):
            parent = self.parent(node)
            attribute = isinstance(parent, cst.Attribute) and parent.attr is node
            keyword = isinstance(parent, cst.Arg) and parent.keyword is node
            if node.value == name and not attribute and not keyword:
                yield node

    def imports(self, *modules: str) -> bool:
        """Whether one of these modules, or a module inside one, is imported."""
        return any(
            name == module or name.startswith(f"{module}.")
            for name in self.imported
            for module in modules
        )

    @cached_property
    def imported(self) -> set[str]:
        """The full names of the modules, and of the names of modules, that are imported."""
        found = {dotted(alias.name) for node in self.all(cst.Import) for alias in node.names}
        for node in self.all(cst.ImportFrom):
            if node.module is not None:
                module = dotted(node.module)
                found.add(module)
                if not isinstance(node.names, cst.ImportStar):
                    found |= {f"{module}.{dotted(alias.name)}" for alias in node.names}
        return found

    # Changes

    def replace(self, node: cst.CSTNode, new: str) -> Edit:
        """Write something else in place of a node."""
        return Edit(self.start(node), self.end(node), new)

    def insert(self, at: int, text: str) -> Edit:
        """Write something before a character."""
        return Edit(at, at, text)

    def finding(self, node: cst.CSTNode, why: str, *edits: Edit) -> Finding:
        """A finding at a node."""
        return Finding(self.line(node), why, edits)

    def indent(self, statement: cst.CSTNode) -> str:
        """The white space before a statement."""
        start = self.start(statement)
        return self.text[self.text.rfind("\n", 0, start) + 1 : start]

    def before(self, statement: cst.CSTNode, *lines: str) -> Edit:
        """Write lines before a statement."""
        decorators = getattr(statement, "decorators", ())
        start = self.start(decorators[0] if decorators else statement)
        indent = self.indent(decorators[0] if decorators else statement)
        text = "".join(f"{line}\n{indent}" for line in lines)
        return Edit(start, start, text.replace(f"\n{indent}\n", "\n\n"))

    def after(self, statement: cst.SimpleStatementLine, *lines: str) -> Edit:
        """Write lines after a statement."""
        end = self.text.find("\n", self.end(statement))
        end = len(self.text) if end < 0 else end
        indent = self.indent(statement)
        return Edit(end, end, "".join(f"\n{indent}{line}" if line else "\n" for line in lines))

    def remove(self, statement: cst.SimpleStatementLine) -> Edit | None:
        """Remove a statement; None if there is another one in its line."""
        if len(statement.body) != 1:
            return None
        block = self.parent(statement)
        if isinstance(block, cst.IndentedBlock) and len(block.body) == 1:
            return self.replace(statement, "pass")
        start = self.text.rfind("\n", 0, self.start(statement)) + 1
        end = self.text.find("\n", self.end(statement)) + 1
        return Edit(start, end or len(self.text), "")


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all that is in it, in the order of the text."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


def dotted(node: cst.CSTNode) -> str:
    """The text of a name with dots; "" if it is something else."""
    if isinstance(node, cst.Name):
        return str(node.value)
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def argument(call: cst.Call, name: str, position: int | None = None) -> cst.Arg | None:
    """An argument of a call by its keyword, or by its position from 0 on; None without it."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg
    if position is None or position >= len(call.args):
        return None
    if any(arg.star for arg in call.args[: position + 1]):
        return None
    found = call.args[position]
    return found if found.keyword is None else None


def keywords(call: cst.Call) -> set[str]:
    """The keywords of a call."""
    return {arg.keyword.value for arg in call.args if arg.keyword is not None}


def without_arguments(code: Code, call: cst.Call, *dropped: cst.Arg) -> list[Edit]:
    """Remove arguments of a call; what stays keeps its line breaks."""
    kept = [arg for arg in call.args if arg not in dropped]
    if dropped and not kept:
        return [Edit(code.start(call.args[0]), code.end(call) - 1, "")]
    edits = []
    for arg in dropped:
        index = list(call.args).index(arg)
        later = [a for a in call.args[index + 1 :] if a in kept]
        if later:
            edits.append(Edit(code.start(arg), code.start(call.args[index + 1]), ""))
        else:  # it is among the last: with the comma before it
            previous = call.args[index - 1] if index else None
            begin = code.start(arg) if previous is None else code.end(previous)
            edits.append(Edit(begin, code.end(arg), ""))
    return edits


def is_value(node: cst.BaseExpression | None, *texts: str) -> bool:
    """Whether an expression is one of these literals or names."""
    if isinstance(node, cst.Name | cst.Integer | cst.Float):
        return node.value in texts
    if isinstance(node, cst.UnaryOperation) and isinstance(node.expression, cst.Integer):
        return f"-{node.expression.value}" in texts
    return False


def string(node: cst.BaseExpression | None) -> str | None:
    """The value of a literal string; None if it is something else."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None
