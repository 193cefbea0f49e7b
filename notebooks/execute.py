"""Executes the notebooks, and keeps their outputs without what is this machine's alone.

    python notebooks/execute.py               # all of them, in some minutes
    python notebooks/execute.py quickstart    # one

Host names, process ids, paths, ports and memory addresses are replaced. What Spark and TensorFlow
log while they start is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

HERE = Path(__file__).parent
_CELL = r"<td[^>]*>"
_FOLDERS = r"(?<![\w.])/(?:tmp|home|root|work|var|usr|opt)/"
# Replaced in texts and HTML, in this order. `host` stands there already for the machine's name.
_REPLACED = (
    (r"(?:/[\w.+-]+)*/ipykernel_\d+/\d+\.py", "cell.py"),
    (r"(?:/[\w.+-]+)+/(?:site|dist)-packages/", ".../site-packages/"),
    (rf"{_FOLDERS}(?:[\w.+-]+/)*([\w+-]+\.\w+)\b", r".../\1"),
    (rf"{_FOLDERS}[\w./+-]*", ".../"),
    (r"\b(\d{1,3}\.){3}\d{1,3}\b(?!\.\d)", "address"),
    (r"\b(host|address|localhost):\d{2,5}\b", r"\1:port"),
    (r"\b(pid|process) \d+", r"\1 ..."),
    (r"^(HorovodRunner: +\d+ +host +)\d+", r"\1..."),  # a row of the table of ranks
    (rf"({_CELL}\d+</td>{_CELL}host</td>{_CELL})\d+", r"\1..."),
    (r"\b0x[0-9a-f]{6,}\b", "0x..."),
)
# Lines that Spark, Java, absl, TensorFlow and Keras write when they start; of ranks, too.
_LOGGED = re.compile(
    r"(\[\d+\] )?((\d\d/\d\d/\d\d|\d{4}-\d\d-\d\d) \d\d:\d\d:\d\d|[EWI]\d{4} \d\d:\d\d|"
    r"WARNING: |:: |Setting (default|Spark) log level|To adjust logging level|Downloading data|"
    r"Using Spark's default log4j|All log messages before|\S+: FutureWarning: PySpark does not yet|"
    r"  require_minimum_pandas_version)"
)


def cleaned(text: str, hostname: str) -> str:
    """A text or HTML of a cell's output without what names a machine."""
    lines = [line for line in text.splitlines(keepends=True) if not _LOGGED.match(line)]
    text = re.sub(rf"\b{re.escape(hostname)}(?:\.[\w.-]+)?\b", "host", "".join(lines))
    for pattern, replacement in _REPLACED:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def strip(notebook: Any, hostname: str) -> None:
    """Clean the outputs of an executed notebook, and note which code they belong to."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["outputs_of"] = digest(notebook)
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _keep(output, hostname)]


def _keep(output: Any, hostname: str) -> bool:
    """Clean an output; returns whether anything is left of it."""
    if output.output_type == "stream":
        output.text = cleaned(output.text, hostname)
        return bool(output.text.strip())
    output.metadata = {}
    for kind, data in list(output.data.items()):
        if kind.startswith("application/"):  # widgets: the page and the text beside them stay
            del output.data[kind]
        elif kind.startswith("text/"):
            output.data[kind] = cleaned(data, hostname)
    return bool(output.data)


def digest(notebook: Any) -> str:
    """A digest of the code of all cells: outputs with another one are out of date."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def execute(path: Path) -> None:
    """Execute a notebook in an empty folder, and write it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails; the notebook stays as it was.
    """
    notebook = nbformat.read(path, 4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KERAS_HOME"] = f"{folder}/keras"  # nothing that was downloaded before
        os.mkdir(f"{folder}/empty")
        nbclient.NotebookClient(
            notebook,
            timeout=500,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": f"{folder}/empty"}},
        ).execute()
    strip(notebook, socket.gethostname())
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook, indent=1).rstrip("\n") + "\n")


def main() -> int:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description="Execute notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", help="without .ipynb; default: all")
    names = parser.parse_args().names or sorted(path.stem for path in HERE.glob("*.ipynb"))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.pop("PYSPARK_PYTHON", None)  # as for a person who opens the notebook
    os.environ["JPY_SESSION_NAME"] = "notebook.ipynb"  # a frontend: the panel instead of lines
    os.environ["FASHION_MNIST"] = ""  # the digits stand in, here as in the tests
    for name in ("http_proxy", "https_proxy"):
        os.environ[name] = "http://127.0.0.1:9"
    for name in names:
        print(name, flush=True)
        execute(HERE / f"{name}.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())
