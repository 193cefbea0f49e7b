"""How a rule is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.tree import Change

Rule: TypeAlias = Callable[[Code], Iterable[OldCode]]
When: TypeAlias = Callable[[Code], bool]
#: All rules.
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule for a whole text."""
    RULES.append(function)
    return function


def on(*matchers: Any, when: When = lambda _code: True) -> Callable[..., Any]:
    """Add a rule for each node that one of some matchers matches."""

    def add(function: Callable[[Code, Any], OldCode | None]) -> Any:
        @rule
        def _each(code: Code) -> Iterator[OldCode]:
            for matcher in matchers if when(code) else ():
                for node in code.found(matcher):
                    if finding := function(code, node):
                        yield finding

        return function

    return add


def fix(
    matcher: Any,
    why: str,
    change: Change | None = None,
    *,
    when: When = lambda _code: True,
    where: Callable[[Code, Any], bool] = lambda _code, _node: True,
) -> None:
    """Add a rule with one reason and one change of the node; only told without a change.

    ``when`` chooses texts, ``where`` nodes in them.
    """

    @on(matcher, when=when)
    def _(code: Code, node: Any) -> OldCode | None:
        changes = {} if change is None else {node: change}
        return OldCode(node, why, changes) if where(code, node) else None
