"""Files and notebooks as one text, and back.

The code cells of a notebook are one text, because a name of one cell is used in others. A call that
no one else writes stands before each cell, and lines that are no Python are hidden in comments.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from pathlib import Path
from typing import Any

from horovod_runner.errors import HorovodRunnerError

_CELL = "__horovod_runner_cell__"
_MAGIC = "__horovod_runner_magic__"
_MARK = re.compile(rf"^{_CELL}\((\d+)\)\n", re.MULTILINE)
_HIDDEN = re.compile(rf"{_MAGIC}\((\d+)\)")
# Lines for IPython and Databricks: %pip, !ls, ! ls, files = !ls, ?print, print?
_NOT_PYTHON = re.compile(r"^(\s*)((?:\w+\s*=\s*)?(?:%[%./\w]|!(?!=)).*|\?.*|[\w.]+\?+)$")
# A cell for another language, or for another program; %%time and its like are above Python.
_OTHER_LANGUAGE = re.compile(r"%(%(?!(?:time|timeit|capture|prun)\b)|(sql|md|sh|scala|r|fs)\b)")


class MigrateError(HorovodRunnerError):
    """A file cannot be read or written, or is not Python 3."""


class SourceFile:
    """A Python file; raises MigrateError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        raw, self._encoding = _read(path)
        self._newline = "\r\n" if "\r\n" in raw else "\n"
        #: The text, with "\n" at the ends of its lines.
        self.text = raw.replace("\r\n", "\n")

    def place(self, line: int, text: str) -> str:
        """Where a user finds a line of a text; the text is this one, or a later one of it."""
        return f"line {line}"

    def parts(self, text: str) -> list[tuple[str, str]]:
        """The parts of a text to compare: their names and texts."""
        return [(self.path.name, text)]

    def write(self, text: str) -> None:
        """Write a text to the file."""
        _write(self.path, text.replace("\n", self._newline), self._encoding)


class Notebook(SourceFile):
    """A Jupyter notebook, also one that Databricks has exported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw, self._encoding = _read(path)
        self._hidden: list[str] = []
        try:
            self._notebook = json.loads(self._raw)
            cells = enumerate(self._notebook["cells"], 1)
            self._cells: dict[int, Any] = {n: c for n, c in cells if c["cell_type"] == "code"}
        except (ValueError, KeyError, TypeError) as error:
            raise MigrateError(f"{path} is not a notebook of version 4: {error!r}") from error
        parts = []
        #: Cells that are not Python 3, and do not say that they are something else.
        self.skipped: list[int] = []
        for number, cell in list(self._cells.items()):
            source = "".join(cell["source"])
            text = self._hide(source)
            if text is None:
                del self._cells[number]
                if not _OTHER_LANGUAGE.match(source.lstrip()):
                    self.skipped.append(number)
            else:
                parts.append(f"{_CELL}({number})\n{text}\n")
        self.text = "".join(parts)

    def _hide(self, text: str) -> str | None:
        """A cell's text as Python; None if it is no Python."""
        if _OTHER_LANGUAGE.match(text.lstrip()):
            return None
        if _is_python(text):
            return text
        lines, kept = text.split("\n"), []
        while lines:
            line = lines.pop(0)
            found = _NOT_PYTHON.match(line)
            if found:
                while line.endswith("\\") and lines:
                    line += "\n" + lines.pop(0)
                kept.append(f"{found[1]}{_MAGIC}({len(self._hidden)})")
                self._hidden.append(line.removeprefix(found[1]))
            else:
                kept.append(line)
        hidden = "\n".join(kept)
        return hidden if _is_python(hidden) else None

    def place(self, line: int, text: str) -> str:
        before = "\n".join([*text.split("\n")[: line - 1], ""])
        *_, last = _MARK.finditer(before)
        # A magic command may have had several lines.
        number = self._shown(before[last.end() :]).count("\n") + 1
        return f"cell {last[1]}, line {number}"

    def parts(self, text: str) -> list[tuple[str, str]]:
        return [(f"{self.path.name}, cell {n}", part) for n, part in self._split(text).items()]

    def _split(self, text: str) -> dict[int, str]:
        """The texts of the cells that are Python, as the notebook has them."""
        marked = _MARK.split(text)[1:]
        pairs = zip(marked[::2], marked[1::2], strict=True)
        return {int(number): self._shown(part.removesuffix("\n")) for number, part in pairs}

    def _shown(self, text: str) -> str:
        """A text with the lines that are hidden in it."""
        return _HIDDEN.sub(lambda found: self._hidden[int(found[1])], text)

    def write(self, text: str) -> None:
        for number, part in self._split(text).items():
            cell = self._cells[number]
            if part != "".join(cell["source"]):
                as_list = isinstance(cell["source"], list)
                cell["source"] = part.splitlines(keepends=True) if as_list else part
        found = re.match(r"\{\s*?\n( +|\t+)", self._raw)
        indent = None if found is None else found[1]
        end = "\n" if self._raw.endswith("\n") else ""
        new = json.dumps(self._notebook, indent=indent, ensure_ascii=False) + end
        _write(self.path, new, self._encoding)


def open_source(path: Path) -> SourceFile:
    """Return the source of a ``.py`` or ``.ipynb`` file."""
    if path.suffix == ".ipynb":
        return Notebook(path)
    if path.suffix == ".py":
        return SourceFile(path)
    raise MigrateError(f"{path} is neither a .py file nor a .ipynb notebook")


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            # As a notebook compiles a cell: await may stand outside of functions.
            compile(text, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return True


def _read(path: Path) -> tuple[str, str]:
    """The text of a file and its encoding, which a mark or a line of it may name."""
    try:
        raw = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding), encoding
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise MigrateError(f"{path} cannot be read: {error}") from error


def _write(path: Path, text: str, encoding: str) -> None:
    try:
        path.write_bytes(text.encode(encoding))
    except OSError as error:
        raise MigrateError(f"{path} cannot be written: {error}") from error
