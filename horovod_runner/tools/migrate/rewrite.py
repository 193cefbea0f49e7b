"""All rules on a text, until none of them has anything to change."""

from __future__ import annotations

import ast
from typing import NamedTuple

import libcst as cst

from horovod_runner.tools.migrate.code import Code, OldCode
from horovod_runner.tools.migrate.rules import RULES
from horovod_runner.tools.migrate.source import MigrateError
from horovod_runner.tools.migrate.tree import Changes

_MOST_PASSES = 50


class Found(NamedTuple):
    """A finding by its line in the original text, and its line in the new one if it is left."""

    line: int
    new_line: int | None
    why: str


class Rewritten(NamedTuple):
    """The new text, and what was changed and what is left, in the order of the lines."""

    text: str
    found: list[Found]


def rewrite(text: str, name: str) -> Rewritten:
    """Apply all rules to Python code whose lines end with a newline character alone.

    Raises:
        MigrateError: it is not Python 3.
    """
    code = Code(_parse(text, name))
    findings = _findings(code)
    changed: set[Found] = set()
    for _ in range(_MOST_PASSES):
        changes: Changes = {}
        for finding in findings:
            if finding.changes and not finding.changes.keys() & changes.keys():
                changes |= finding.changes
                changed.add(Found(code.line(finding.node), None, finding.why))
        if not changes:
            break
        code = code.changed(changes)
        findings = _findings(code)
    told = [finding for finding in findings if not finding.changes]
    left = {Found(code.line(f.node), code.new_line(f.node), f.why) for f in told}
    return Rewritten(code.text, sorted(changed | left, key=lambda found: (found.line, found.why)))


def _findings(code: Code) -> list[OldCode]:
    return [finding for rule in RULES for finding in rule(code)]


def _parse(text: str, name: str) -> cst.Module:
    try:
        return cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        line, problem = error.raw_line, error.message
        try:
            ast.parse(text)
        except SyntaxError as clearer:
            line, problem = clearer.lineno or 1, clearer.msg
        raise MigrateError(
            f"{name}, line {line}: this is not Python 3 ({problem}). Code for Python 2 needs "
            "another tool first"
        ) from error
