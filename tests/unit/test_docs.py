"""The pages say what is: links lead somewhere, and the commands' help is the commands'."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="argparse's layout is the version's")
def test_the_page_of_the_command_line_is_the_commands_own_help() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "command_line.py"))["page"]
    assert (ROOT / "docs" / "cli.md").read_text() == page()


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    names = {page.stem for page in ROOT.glob("docs/*.md")} - {"index"}
    assert names <= set(index.split())
