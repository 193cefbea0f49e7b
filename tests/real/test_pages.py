"""Code blocks of README and docs pages, run as a reader would run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.pages import ROOT, Reader, blocks

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


@pytest.fixture(scope="module")
def read() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    assert reader.end() == 0


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
