"""`horovod-runner migrate`: shows what has changed since old code was written, and changes it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from horovod_runner.tools.migrate.source import MigrateError, Notebook, Source, open_source


def migrate(paths: Sequence[str], *, write: bool, say: Callable[[str], None]) -> None:
    """Show the changes of files, and what has to be changed by hand.

    Args:
        paths: ``.py`` files and ``.ipynb`` notebooks.
        write: whether to write the changes to the files.
        say: called with each line to show.

    Raises:
        MigrateError: libcst is not installed, or a file cannot be read or written, or is not
            Python 3.
    """
    try:
        from horovod_runner.tools.migrate.rewrite import rewrite
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise MigrateError(
            "migrate requires libcst, which is not installed: pip install 'horovod_runner[migrate]'"
        ) from error
    for path in paths:
        source = open_source(Path(path))
        result = rewrite(source.text, path)
        for line in _diff(source, result.text):
            say(line)
        for number in source.skipped if isinstance(source, Notebook) else ():
            say(f"{path}, cell {number}: skipped, because it is not Python 3")
        changes = [found for found in result.found if found.new_line is None]
        left = [found for found in result.found if found.new_line is not None]
        for found in changes:
            say(f"{path}, {source.place(found.line, source.text)}: changed. {found.why}.")
        for found in left:
            at = source.place(found.line, source.text)
            if write and found.new_line is not None:
                at = source.place(found.new_line, result.text)
            say(f"{path}, {at}: by hand. {found.why}.")
        if write and changes:
            source.write(result.text)
        say(_summary(path, len(changes), len(left), written=write))


def _diff(source: Source, text: str) -> Iterator[str]:
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
        parts.append(f"{_count(changes, 'change')} {'written' if written else shown}")
    if left:
        parts.append(f"{_count(left, 'place')} to change by hand")
    return f"{path}: {', '.join(parts)}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
