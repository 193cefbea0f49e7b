"""Runs a notebook as a person does, and tells what its cells then show."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.preload import frameworks_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"


class Shown:
    """What the cells of a notebook show, by their sources."""

    def __init__(self, notebook: Any) -> None:
        self._cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        self.text = "".join(map(_text, self._cells))

    @property
    def pictures(self) -> int:
        """How many pictures there are in all."""
        return sum(len(_data(cell, "image/png")) for cell in self._cells)

    def by(self, source: str) -> str:
        """What the one cell shows that has this in its source."""
        return _text(self._cell(source))

    def html(self, source: str) -> str:
        """The table that the one cell with this in its source ends with."""
        return "".join(_data(self._cell(source), "text/html"))

    def is_picture(self, source: str) -> bool:
        """Whether the one cell with this in its source shows a picture, and one alone."""
        pictures = _data(self._cell(source), "image/png")
        return [base64.b64decode(each)[1:4] for each in pictures] == [b"PNG"]

    def _cell(self, source: str) -> Any:
        (found,) = (cell for cell in self._cells if source in cell.source)
        return found


def _text(cell: Any) -> str:
    """Streams, and the value that the cell ends with."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    return "".join([*streams, *_data(cell, "text/plain")])


def _data(cell: Any, kind: str) -> list[str]:
    outputs = (output.get("data", {}) for output in cell.outputs)
    return [data[kind] for data in outputs if kind in data]


def percent(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(\d+\.\d+)%", text)]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Execute all cells of a notebook, in a folder of its own that is left as it was."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # conftest sets it; a person who opens a notebook has not.
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    # Imports would take most of its time: its ranks are forked from a process that has made them.
    programs = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    names = frameworks_of("\n".join(programs))
    first = f"from tests.preload import preload\npreload({names})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    client = nbclient.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    del notebook.cells[0]
    shown = Shown(notebook)
    warned = [line for line in shown.text.splitlines() if "Warning: " in line]
    # Of createDataFrame, which the notebooks call as their readers would: Spark 4 on pandas 3.
    assert [line for line in warned if "does not yet fully support pandas" not in line] == []
    assert list(folder.iterdir()) == []
    return shown
