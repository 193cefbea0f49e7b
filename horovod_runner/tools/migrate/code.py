"""A module with its names resolved: what the rules ask of it, and how it is changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast

import libcst as cst
import libcst.matchers as m
from libcst.metadata import (
    Assignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    ScopeProvider,
)

from horovod_runner.tools.migrate.tree import REMOVED, Changes, dotted, imports_of, statements, walk

Node = TypeVar("Node", bound=cst.CSTNode)
Unit: TypeAlias = cst.FunctionDef | cst.Module


@dataclass(frozen=True)
class OldCode:
    """A place in old code: what is wrong, and what mends it; no changes if that is done by hand."""

    node: cst.CSTNode
    why: str
    changes: Changes = field(default_factory=dict)


class Code:
    """A module, with its names resolved.

    Args:
        module: the tree; no node is in it twice.
        lines: the nodes' lines in the text that the user knows; those of ``module`` if not given.
    """

    def __init__(self, module: cst.Module, lines: dict[cst.CSTNode, int] | None = None) -> None:
        self._wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = module
        self._parents = self._wrapper.resolve(ParentNodeProvider)
        self._names = self._wrapper.resolve(QualifiedNameProvider)
        self._scopes = self._wrapper.resolve(ScopeProvider)
        self._lines = lines or {node: self.new_line(node) for node in self._parents}

    @cached_property
    def text(self) -> str:
        """The module's text."""
        return str(self.module.code)

    def source(self, node: cst.CSTNode) -> str:
        """The text of a node, with the parentheses around it."""
        return str(self.module.code_for_node(node))

    def line(self, node: cst.CSTNode) -> int:
        """The line of a node in the text that the user knows, from 1 on."""
        known = (self._lines[each] for each in (node, *self.above(node)) if each in self._lines)
        return next(known, 1)

    def new_line(self, node: cst.CSTNode) -> int:
        """The line of a node in this text, from 1 on."""
        return int(self._wrapper.resolve(PositionProvider)[node].start.line)

    # What is around a node

    def parent(self, node: cst.CSTNode) -> Any:
        """The node around a node; None for the module."""
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around a node, the nearest first."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def around(self, node: cst.CSTNode, *kinds: Any) -> Any:
        """The nearest node of some kinds around a node; None if there is none."""
        return next((each for each in self.above(node) if isinstance(each, kinds)), None)

    def statement(self, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
        """The line of statements that a node is in; None in the head of a block."""
        line = self.around(node, cst.SimpleStatementLine, cst.BaseSuite)
        return line if isinstance(line, cst.SimpleStatementLine) else None

    def unit(self, node: cst.CSTNode) -> Unit:
        """The function that a node is in; the module outside all functions."""
        return self.around(node, cst.FunctionDef) or self.module

    # What a node means

    def names(self, node: cst.CSTNode) -> set[str]:
        """The full names that an expression may have: ``tensorflow.Session`` of ``tf.Session``."""
        found = self._names.get(node, ())
        return {each.name for each in (found() if callable(found) else found)}

    def name(self, node: cst.CSTNode, *packages: str) -> str:
        """An expression's full name, or its name inside the first package that has it; or ""."""
        if not packages:
            return min(self.names(node), default="")
        for name in sorted(self.names(node)):
            for package in packages:
                if name.startswith(f"{package}."):
                    return name.removeprefix(f"{package}.")
        return ""

    def values(self, node: cst.CSTNode) -> list[Any]:
        """The expressions that are assigned to a name; [] if it is also bound in another way."""
        scope = self._scopes.get(node)
        found = []
        for assignment in scope[dotted(node)] if isinstance(node, cst.Name) and scope else ():
            target = self.parent(assignment.node) if isinstance(assignment, Assignment) else None
            statement = self.parent(target) if isinstance(target, cst.AssignTarget) else None
            if not isinstance(statement, cst.Assign):
                return []
            found.append(statement.value)
        return found

    def assigned(self, value: cst.CSTNode) -> str:
        """The variable that an expression is assigned to, in a statement of its own; or ""."""
        statement = self.parent(value)
        alone = isinstance(statement, cst.Assign) and len(statement.targets) == 1
        target = statement.targets[0].target if alone else None
        return str(target.value) if isinstance(target, cst.Name) else ""

    def is_bound(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a name is visible at a node."""
        scope = self._scopes.get(node)
        return scope is not None and bool(scope[name])

    # The nodes of a kind

    @cached_property
    def _nodes(self) -> dict[type[cst.CSTNode], list[cst.CSTNode]]:
        found: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}
        for node in walk(self.module):
            found.setdefault(type(node), []).append(node)
        return found

    def all(self, kind: type[Node], inside: cst.CSTNode | None = None) -> list[Node]:
        """All nodes of a kind, in the order of the text."""
        if inside is None or inside is self.module:
            return cast("list[Node]", self._nodes.get(kind, []))
        return [node for node in walk(inside) if isinstance(node, kind)]

    def found(self, matcher: Any) -> Iterator[Any]:
        """The nodes that a matcher of one kind of node matches, in the order of the text."""
        for node in self.all(getattr(cst, type(matcher).__name__)):
            if self.matches(node, matcher):
                yield node

    def matches(self, node: cst.CSTNode | None, matcher: Any) -> bool:
        """Whether a matcher matches a node; full names are known to it."""
        return node is not None and m.matches(node, matcher, metadata_resolver=self._wrapper)

    def uses(self, name: str, inside: cst.CSTNode | None = None) -> Iterator[cst.Name]:
        """The places where a variable is meant: no attributes and keywords of its name."""
        for node in self.all(cst.Name, inside):
            parent = self.parent(node)
            attribute = isinstance(parent, cst.Attribute) and parent.attr is node
            keyword = isinstance(parent, cst.Arg) and parent.keyword is node
            if node.value == name and not attribute and not keyword:
                yield node

    @cached_property
    def imported(self) -> set[str]:
        """The full names of the modules, and of the names of modules, that are imported."""
        found = {name for node in self.all(cst.Import) for name in imports_of(node)}
        for node in self.all(cst.ImportFrom):
            found |= {dotted(node.module), *imports_of(node)}
        return found

    def imports(self, *modules: str) -> bool:
        """Whether one of these modules, or a module inside one, is imported."""
        inside = tuple(f"{module}." for module in modules)
        return any(name in modules or name.startswith(inside) for name in self.imported)

    # Changes

    def changed(self, changes: Changes) -> Code:
        """The code with these changes. Nodes keep the lines that the user knows."""
        lines: dict[cst.CSTNode, int] = {}
        return Code(self.module.visit(_Apply(self, changes, lines)), lines)

    def removes(self, *statements: cst.SimpleStatementLine | None) -> Changes | None:
        """Remove statements; None if there is another one in the line of one of them."""
        if any(statement is None or len(statement.body) != 1 for statement in statements):
            return None
        return {each: lambda line: line.with_changes(body=REMOVED) for each in statements if each}


class _Apply(cst.CSTTransformer):
    def __init__(self, code: Code, changes: Changes, lines: dict[cst.CSTNode, int]) -> None:
        super().__init__()
        self._code, self._changes, self._lines = code, changes, lines

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        change = self._changes.get(original_node)
        new = updated_node if change is None else change(updated_node)
        if isinstance(new, cst.IndentedBlock | cst.Module):
            new = self._without_empty(new)
        for node in new if isinstance(new, cst.FlattenSentinel) else [new]:
            self._lines[node] = self._code.line(original_node)
        return new

    def _without_empty(self, block: Any) -> Any:
        """Drop the statements that are removed; the comments above them stay."""
        if not any(getattr(statement, "body", None) is REMOVED for statement in block.body):
            return block
        body: list[Any] = []
        comments: list[cst.EmptyLine] = []
        for statement in block.body:
            if getattr(statement, "body", None) is REMOVED:
                comments += statement.leading_lines
                continue
            kept = statement
            if comments:
                kept = statement.with_changes(leading_lines=[*comments, *statement.leading_lines])
                self._lines[kept] = self._lines[statement]
                comments = []
            body.append(kept)
        if not body and isinstance(block, cst.IndentedBlock):
            body = [statements("pass")[0].with_changes(leading_lines=comments)]
            comments = []
        return block.with_changes(body=body, footer=[*comments, *block.footer])
