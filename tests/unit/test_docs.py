"""README and docs pages: links, code blocks, option names, public names, the command's help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import horovod_runner
from horovod_runner.common import options

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _python_blocks(page: Path) -> Iterator[ast.Module]:
    """The Python code blocks of a page, also of its lists.

    Raises:
        SyntaxError: a block is not valid Python; its line is that of the page.
    """
    text = page.read_text()
    for block in re.finditer(r"^( *)```python\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        lines_before = text.count("\n", 0, block.start(2))
        code = re.sub(rf"^{block[1]}", "", block[2], flags=re.MULTILINE)
        yield ast.parse("\n" * lines_before + code, str(page))


@each_page
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text())
    missing = []
    for link, anchor in links:
        target = page.parent / link if link else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert missing == []


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and myst make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings}


@each_page
def test_code_blocks_are_python_and_use_existing_options(page: Path) -> None:
    known = {kind.__name__: _parameters(kind) for kind in options.GROUPS.values()}
    known["HorovodRunner"] = {option.name for option in dataclasses.fields(options.Options)}
    for module in _python_blocks(page):
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in known:
                given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                unknown = given - known[call.func.id]
                assert not unknown, f"{page.name}:{call.lineno}: {call.func.id} has no {unknown}"


def _parameters(kind: type) -> set[str]:
    return set(inspect.signature(kind).parameters)


def test_the_options_of_the_runner_are_the_fields_of_the_options() -> None:
    fields = {option.name for option in dataclasses.fields(options.Options)}
    assert _parameters(horovod_runner.HorovodRunner) == fields


def test_the_page_of_settings_is_made_of_the_options() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert text == made["page"](), "run python docs/settings.py > docs/reference/settings.md"
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    kinds = {"HorovodRunner": options.Options}
    kinds |= {kind.__name__: kind for kind in options.GROUPS.values()}
    wanted = [
        (field.name, name) for name, kind in kinds.items() for field in dataclasses.fields(kind)
    ]
    assert sorted(listed) == sorted(wanted)


def test_the_page_of_settings_has_the_variables_that_users_set() -> None:
    variables = runpy.run_path(str(ROOT / "docs" / "settings.py"))["VARIABLES"]
    named = {name for name, *_ in variables}
    code = "".join(path.read_text() for path in ROOT.glob("horovod_runner/**/*.py"))
    # Read by Horovod, PySpark and Keras.
    elsewhere = {"HOROVOD_CACHE_CAPACITY", "PYSPARK_PYTHON", "TMPDIR"}
    assert {name for name in named - elsewhere if name not in code} == set()
    own = set(re.findall(r"\"(HOROVOD_RUNNER_[A-Z_]+)\"", code))
    # Between processes of a run or of a build: nobody sets them.
    internal = {"DATA", "DEVICE", "LEFT", "RUN", "TEMPORARY", "CPU", "REQUIRES", "RPATH"}
    assert own - {f"HOROVOD_RUNNER_{name}" for name in internal} <= named


def test_the_page_of_errors_has_each_error_with_a_cause() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S.+?) \|", text, re.MULTILINE)
    public = {name for name in horovod_runner.__all__ if name.endswith("Error")}
    assert public - {"HorovodRunnerError"} <= {name for name, _ in rows}


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    programs = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    assert len(programs.sub("", text).splitlines()) <= 120  # of prose
    of_python = [code for kind, code in programs.findall(text) if kind == "python"]
    assert len(of_python) == 2
    with_fit, with_prepare = (len([*filter(None, code.splitlines())]) for code in of_python)
    assert with_fit <= 23
    assert with_prepare <= 22


def test_the_api_page_has_all_public_names() -> None:
    api = (ROOT / "docs" / "reference" / "api.md").read_text()
    documented = set(re.findall(r"auto(?:class|function):: (?:[\w.]*\.)?(\w+)$", api, re.MULTILINE))
    errors = {name for name in horovod_runner.__all__ if name.endswith("Error")}  # an automodule
    assert set(horovod_runner.__all__) - errors <= documented


@pytest.mark.parametrize("name", ["data", "spmd"])
def test_the_api_page_has_all_public_names_of_a_module(name: str) -> None:
    pytest.importorskip("pyarrow")
    module = __import__(f"horovod_runner.{name}", fromlist=["*"])
    api = (ROOT / "docs" / "reference" / "api.md").read_text()
    missing = [
        public for public in module.__all__ if f":: horovod_runner.{name}.{public}\n" not in api
    ]
    assert missing == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="argparse's layout is the version's")
def test_the_page_of_the_command_line_is_the_help_of_the_commands() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "command_line.py"))["page"]
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == page()


def test_the_page_of_troubleshooting_lists_the_mistakes_of_the_tests() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "mistakes.py"))
    text = made["PAGE"].read_text()
    assert text == made["page"](text), "run python docs/mistakes.py"
    assert text.count("| **") >= 25
