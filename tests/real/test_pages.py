"""Code blocks of README and docs pages, run as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.real.pages import ROOT, blocks

pytestmark = [pytest.mark.horovod, pytest.mark.spark, pytest.mark.xdist_group("pages")]

#: Pages of which every block runs, in its order.
WHOLE = [
    "README.md",
    "docs/index.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/get_started/*.md")),
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/tutorials/*.md")),
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/howto/from_*.md")),
    *(f"docs/howto/{name}.md" for name in ("delta", "error_report", "mlflow", "spot", "tune")),
    "docs/concepts/run.md",
    "docs/reference/errors.md",
]
WHOLE = [page for page in WHOLE if blocks(page)]
#: Pages whose first block runs, with the last line that it prints, as a pattern.
FIRST = {
    "docs/concepts/collectives.md": r"1\.0 gloo",
    "docs/howto/checkpoints.md": r"49 +100 +\d\.\d+(e-\d+)?",
    "docs/howto/data.md": r"\{'error': \d\.\d+(e-\d+)?\}",
    "docs/howto/elastic.md": r"\(3, 200\)",
    "docs/howto/gpu.md": r"\[.*\]",
    "docs/howto/handle.md": r"loss 0\.\d+",
    "docs/howto/torch_distributed.md": r"\('hvd', 0\.\d+\)",
}


class Reader(Protocol):
    """Runs the blocks of a page and returns what each prints."""

    def __call__(self, page: str, *, first: bool = False) -> list[str]: ...


@pytest.fixture(scope="module")
def read() -> Iterator[Reader]:
    """A process that runs one page after the other, so that ranks start with what is imported."""
    reader = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "real" / "pages.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert reader.stdin
    assert reader.stdout

    def ask(page: str, *, first: bool = False) -> list[str]:
        print(json.dumps({"page": page, "first": first}), file=reader.stdin, flush=True)
        answer: dict[str, Any] = json.loads(reader.stdout.readline())
        assert "error" not in answer, answer["error"]
        return list(answer["printed"])

    yield ask
    reader.stdin.close()
    assert reader.wait(60) == 0


# Slow: the programs of a page run one after another in new processes, as a reader would run them.
@pytest.mark.parametrize("page", WHOLE)
def test_a_page_runs_as_pasted_and_prints_what_it_says(page: str, read: Reader) -> None:
    for block, printed in zip(blocks(page), read(page), strict=True):
        if block.prints is not None and block.reason is None:
            assert _shape(printed) == _shape(block.prints), f"{page}:{block.line}"


def _shape(text: str) -> list[str]:
    """The lines of an output without numbers, and without the widths of columns."""
    lines = []
    for line in text.splitlines():
        plain = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", line)
        lines.append(re.sub(r"-+", "-", re.sub(r"\s+", " ", plain)).strip())
    return sorted(lines)  # two ranks print in any order


@pytest.mark.parametrize("page", FIRST)
def test_the_first_program_of_a_page_runs(page: str, read: Reader) -> None:
    (printed,) = read(page, first=True)
    assert re.fullmatch(FIRST[page], printed.splitlines()[-1]), printed


def test_a_block_that_cannot_run_here_says_why() -> None:
    left_out = [block for page in WHOLE for block in blocks(page) if block.reason is not None]
    assert all(len(block.reason or "") > 10 for block in left_out)
    assert len(left_out) <= 15  # most of them are the old code of pages that migrate


def test_pages_show_what_their_programs_print() -> None:
    tutorials = [page for page in WHOLE if Path(page).parent.name == "tutorials"]
    assert len(tutorials) >= 5
    for page in ["README.md", *tutorials]:
        assert any(block.prints and len(block.prints) > 10 for block in blocks(page)), page
