"""The code blocks of a documentation page, and a process that runs them as a reader would.

Alone, this file prints what pages print: PYTHONPATH=. python tests/real/pages.py README.md ...
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from tests.preload import frameworks_of, preload, without_what_imports_set

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n\n?)?"
    r"(?P<indent> *)```(?P<kind>\w+)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Reader:
    """A process that runs one page after the other, so that ranks start with what is imported.

    Args:
        *python: the command of its Python.
    """

    def __init__(self, *python: str) -> None:
        self._program = subprocess.Popen(
            [*(python or [sys.executable]), __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __call__(self, page: str, *, first: bool = False) -> list[str]:
        """Run the blocks of a page, or the first one; return what each prints."""
        assert self._program.stdin
        assert self._program.stdout
        print(json.dumps({"page": page, "first": first}), file=self._program.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._program.stdout.readline())
        assert "error" not in answer, answer["error"]
        return list(answer["printed"])

    def end(self) -> int:
        assert self._program.stdin
        self._program.stdin.close()
        return self._program.wait(60)


class Block(NamedTuple):
    """A program of a page."""

    line: int
    code: str
    reason: str | None  # why it cannot run here; None for a block that runs
    prints: str | None  # the text block right after it, which is what it prints


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page, in their order."""
    text = (ROOT / page).read_text()
    found = list(_BLOCK.finditer(text))
    programs = []
    for number, match in enumerate(found):
        if match["kind"] != "python":
            continue
        after = found[number + 1] if number + 1 < len(found) else None
        shown = after is not None and after["kind"] == "text"
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("code")) + 1
        prints = after["code"] if shown and after is not None else None
        programs.append(Block(line, code, match["reason"], prints))
    return programs


def run(page: str, *, first: bool = False) -> list[str]:
    """Run the blocks of a page in their order, or the first one; return what each prints."""
    names: dict[str, Any] = {"__name__": "__main__"}  # so that functions are pickled by value
    printed = []
    for block in blocks(page)[: 1 if first else None]:
        shown = io.StringIO()
        if block.reason is None:
            # Of the page's own lines, for tracebacks.
            code = compile("\n" * (block.line - 1) + block.code, page, "exec")
            with contextlib.redirect_stdout(shown):
                exec(code, names)
        printed.append(shown.getvalue())
    return printed


def answer(page: str, *, first: bool = False) -> dict[str, Any]:
    """Run a page in this folder, which is empty before and after it."""
    environment = dict(os.environ)
    try:
        programs = [block.code for block in blocks(page) if block.reason is None]
        preload(frameworks_of("\n".join(programs)))
        return {"printed": run(page, first=first), "files": sorted(os.listdir())}
    except BaseException:
        return {"error": traceback.format_exc()}
    finally:
        without_what_imports_set(environment)
        for path in Path().iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """Run the pages that standard input or the command line names."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _serve()


def _serve() -> None:
    if len(sys.argv) > 1:
        for page in sys.argv[1:]:
            begin = time.monotonic()
            result = answer(page)
            print(f"== {page}, {time.monotonic() - begin:.1f} s, {result.get('files')}")
            print(*result.get("printed", []), result.get("error", ""), sep="\n")
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what other programs print is not an answer
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
