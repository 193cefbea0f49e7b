"""All rules on a text, until none of them has anything to change."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

import libcst as cst

from horovod_runner.migrate.code import Code
from horovod_runner.migrate.edits import Finding, apply, lines_before, without_overlaps
from horovod_runner.migrate.rules import (
    callbacks,
    gpus,
    imports,
    keras,
    launch,
    lightning,
    petastorm,
    tensorflow_1,
    training,
)
from horovod_runner.migrate.source import MigrateError

Rule = Callable[[Code], Iterator[Finding]]
_RULES: tuple[Rule, ...] = (
    imports.sparkdl,
    imports.horovod_keras,
    launch.horovod_spark_run,
    imports.horovod_spark,
    launch.torch_distributor,
    launch.zero_ranks,
    petastorm.converters,
    petastorm.leftovers,
    petastorm.others,
    petastorm.readers,
    tensorflow_1.sessions,
    tensorflow_1.renamed,
    tensorflow_1.graphs,
    keras.modules,
    keras.compile_keyword,
    keras.generators,
    keras.optimizers,
    keras.legacy_optimizers,
    keras.backend_values,
    keras.attributes,
    keras.backend_functions,
    keras.other_methods,
    keras.returned_weights,
    keras.losses,
    callbacks.files,
    callbacks.checkpoints,
    callbacks.warmup,
    training.init,
    training.broadcast,
    training.optimizer,
    gpus.numbers,
    gpus.names,
    gpus.other_ways,
    lightning.strategy,
)
_MOST_PASSES = 50


class Found(NamedTuple):
    """A finding, by the line of the original text.

    Attributes:
        line: the line in the original text, from 1 on.
        new_line: the line in the new text; None if the finding was changed.
        why: what is wrong, and what to write.
    """

    line: int
    new_line: int | None
    why: str


class Result(NamedTuple):
    """What became of a text.

    Attributes:
        text: the new one.
        found: what was changed and what is left, in the order of the lines.
    """

    text: str
    found: list[Found]


def rewrite(text: str, name: str) -> Result:
    """Apply all rules to a text.

    Args:
        text: Python code whose lines end with a newline character alone.
        name: the file's, for messages.

    Raises:
        MigrateError: it is not Python 3.
    """
    lines = list(range(1, text.count("\n") + 2))
    changed: list[Found] = []
    for _ in range(_MOST_PASSES):
        findings = _findings(text, name)
        chosen = without_overlaps(findings)
        if not chosen:
            break
        changed += [Found(lines[finding.line - 1], None, finding.why) for finding in chosen]
        edits = [edit for finding in chosen for edit in finding.edits]
        lines = lines_before(text, edits, lines)
        text = apply(text, edits)
    left = [Found(lines[f.line - 1], f.line, f.why) for f in findings if not f.edits]
    return Result(text, sorted({*changed, *left}, key=lambda found: (found.line, found.why)))


def _findings(text: str, name: str) -> list[Finding]:
    try:
        code = Code(text)
    except cst.ParserSyntaxError as error:
        line, problem = _syntax_error(text) or (error.raw_line, error.message)
        raise MigrateError(
            f"{name}, line {line}: this is not Python 3 ({problem}). Code for Python 2 needs "
            "another tool first"
        ) from error
    return [finding for rule in _RULES for finding in rule(code)]


def _syntax_error(text: str) -> tuple[int, str] | None:
    """The line and the words of Python's own error, which is easier to read than libcst's."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error.lineno or 1, error.msg
    return None
