"""The package's structure: rooms, layers and sizes are what CONTRIBUTING.md and the docs say."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "horovod_runner"
# The overlay holds files of Horovod's source.
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "overlay" not in path.parts)
ROOMS = sorted({path.parent for path in FILES} - {PACKAGE})
FILE_LINES, FUNCTION_LINES = 400, 60


def layers() -> list[list[str]]:
    """The layers of setup.cfg, the highest first; those of one layer side by side."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    text = config["importlinter:contract:rooms"]["layers"]
    return [
        [name.strip().removeprefix("horovod_runner.") for name in re.split(r"[|:]", line)]
        for line in text.strip().splitlines()
    ]


def test_the_docs_show_the_layers_of_the_import_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == layers()


def test_files_that_the_docs_name_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\b(?:\w+/)+\w+\.py\b", page))
    assert len(named) > 40
    assert [file for file in named if not any((at / file).exists() for at in (PACKAGE, ROOT))] == []


def test_every_module_and_room_has_a_place_in_the_layers() -> None:
    named = {name for layer in layers() for name in layer}
    top = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()
    }
    assert named == top - {"__init__"}


def test_a_room_says_what_it_holds() -> None:
    silent = [
        name(room)
        for room in ROOMS
        if not ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    ]
    assert silent == []


def test_files_and_functions_are_short_or_say_why() -> None:
    wrong = {}
    for file in FILES:
        text = file.read_text()
        tree = ast.parse(text)
        explained = "Long because" in (ast.get_docstring(tree) or "")
        if len(text.splitlines()) > FILE_LINES and not explained:
            wrong[name(file)] = len(text.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
                if lines > FUNCTION_LINES:
                    wrong[f"{name(file)}: {node.name}"] = lines
    assert wrong == {}


def test_a_patch_of_a_private_name_has_a_comment_that_says_why() -> None:
    """Most tests hand in what they need: a Limits, a clock, a folder."""
    patch = re.compile(r"\.setattr\(.*[\".]_[A-Za-z]\w*\"")
    wrong = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        before = ""  # the line before this one, or before several patches in a row
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if not patch.search(line):
                before = line
            elif "  # " not in line and not before.lstrip().startswith("#"):
                wrong.append(f"{file.relative_to(ROOT)}:{number}")
    assert wrong == []


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))
