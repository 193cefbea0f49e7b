"""The notebooks as they are committed: with outputs, and without what names a machine."""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[2]
EXECUTE = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))
each_notebook = pytest.mark.parametrize(
    "path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem
)
# Of an output: an address, a port, a process id, a path outside the project.
NAMES = (
    r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b",
    r"\blocalhost:\d",
    r"\bpid \d",
    r"^HorovodRunner: +\d+ +\S+ +\d+ ",
    r"(?<![\w.])/(?:tmp|home|root|work|var|usr|opt)/",
    r"ipykernel_\d",
    r"rank \d+ of \d+ on (?!host\b)",
)


def texts(notebook: Any) -> str:
    """All that the cells show, without pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [kind for output in outputs for kind in output.get("data", {}).items()]
    shown = [output.text for output in outputs if output.output_type == "stream"]
    return "\n".join([*shown, *(text for kind, text in data if kind.startswith("text/"))])


@each_notebook
def test_a_notebook_is_committed_with_the_outputs_of_its_code(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.get("outputs_of") == EXECUTE["digest"](notebook), "run make notebooks"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    assert texts(notebook)


@each_notebook
def test_a_notebook_that_draws_has_its_pictures(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in each for each in data)
    assert len(path.read_bytes()) < 1 << 20


@each_notebook
def test_a_notebook_names_no_machine(path: Path) -> None:
    text = path.read_text()
    notebook = nbformat.reads(text, 4)
    shown = texts(notebook)
    assert [name for name in NAMES if re.search(name, shown, re.MULTILINE)] == []
    for machine in (str(ROOT), str(Path.home()), os.uname().nodename + ":"):
        assert machine not in text


@each_notebook
def test_the_cells_of_a_notebook_have_ids_and_no_metadata(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(cell.metadata == {} for cell in notebook.cells)


@pytest.mark.parametrize(
    ("shown", "kept"),
    [
        ("rank 1 of 2 on box7 (pid 4716)", "rank 1 of 2 on host (pid ...)"),
        ("listens on box7.example.org:40123", "listens on host:port"),
        ("http://10.0.0.7:4040/jobs", "http://address:port/jobs"),
        ("HorovodRunner:    0  box7  4716  -", "HorovodRunner:    0  host  ...  -"),
        ("<td>0</td><td>box7</td><td>4716</td>", "<td>0</td><td>host</td><td>...</td>"),
        ('File "/tmp/ipykernel_99/123.py", line 5', 'File "cell.py", line 5'),
        ("/home/ana/env/lib/python3.13/site-packages/torch", ".../site-packages/torch"),
        ("saved in /tmp/tmp1x2y/digits.pt", "saved in .../digits.pt"),
        ("the folder /home/ana is full", "the folder .../ is full"),
        ("<object at 0x7f00deadbeef>", "<object at 0x...>"),
        ("25/11/26 21:40:01 WARN Utils: Your hostname, box7\nready\n", "ready\n"),
        ("accuracy 97.3% of 297, 1.5 and/or 2", "accuracy 97.3% of 297, 1.5 and/or 2"),
    ],
)
def test_outputs_lose_what_names_a_machine_and_keep_the_rest(shown: str, kept: str) -> None:
    assert EXECUTE["cleaned"](shown, "box7") == kept


def test_each_notebook_is_a_page_of_the_docs_with_its_pictures(tmp_path: Path) -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "notebook_pages.py"))["write"](tmp_path)
    index = (ROOT / "docs" / "notebooks" / "index.md").read_text()
    assert {page.stem for page in pages} <= set(index.split())
    for page in pages:
        text = page.read_text()
        assert text.startswith("# ")
        assert ".ipynb)" not in text
        pictures = re.findall(r"!\[.*\]\((.*)\)", text)
        assert pictures
        assert all((tmp_path / picture).exists() for picture in pictures)
