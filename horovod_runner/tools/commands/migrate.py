"""`horovod-runner migrate`: shows what has changed since old code was written, and changes it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horovod_runner.common.text import count_text
from horovod_runner.tools.migrate.source import MigrateError, Notebook, SourceFile, open_source


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    migrate = commands.add_parser(
        "migrate",
        help="change code that was written for sparkdl, horovod.spark, Keras 2 and others",
        description="Show what has changed since a script or notebook was written, as a diff and "
        "with a reason for each change, and what has to be changed by hand. Nothing is run. Needs "
        "libcst: pip install 'horovod_runner[migrate]'.",
    )
    migrate.add_argument("files", nargs="+", metavar="FILE", help="a .py file or .ipynb notebook")
    migrate.add_argument("--write", action="store_true", help="write the changes to the files")
    migrate.set_defaults(command=_migrate)


def _migrate(options: argparse.Namespace) -> int:
    try:
        from horovod_runner.tools.migrate.rewrite import rewrite
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise MigrateError(
            "migrate requires libcst, which is not installed: pip install 'horovod_runner[migrate]'"
        ) from error
    for path in options.files:
        source = open_source(Path(path))
        result = rewrite(source.text, path)
        for line in _diff(source, result.text):
            print(line)
        for number in source.skipped if isinstance(source, Notebook) else ():
            print(f"{path}, cell {number}: skipped, because it is not Python 3")
        changes = [found for found in result.found if found.new_line is None]
        left = [found for found in result.found if found.new_line is not None]
        for found in changes:
            print(f"{path}, {source.place(found.line, source.text)}: changed. {found.why}.")
        for found in left:
            at = source.place(found.line, source.text)
            if options.write and found.new_line is not None:
                at = source.place(found.new_line, result.text)
            print(f"{path}, {at}: by hand. {found.why}.")
        if options.write and changes:
            source.write(result.text)
        print(_summary(path, len(changes), len(left), written=options.write))
    return 0


def _diff(source: SourceFile, text: str) -> Iterator[str]:
    before, after = source.parts(source.text), source.parts(text)
    for (name, old), (_, new) in zip(before, after, strict=True):
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), name, f"{name} (migrated)", lineterm=""
        )
        yield from lines


def _summary(path: str, changes: int, left: int, *, written: bool) -> str:
    if not changes and not left:
        return f"{path}: nothing to change."
    parts = []
    if changes:
        shown = f"shown; --write writes {'it' if changes == 1 else 'them'}"
        parts.append(f"{count_text(changes, 'change')} {'written' if written else shown}")
    if left:
        parts.append(f"{count_text(left, 'place')} to change by hand")
    return f"{path}: {', '.join(parts)}."
