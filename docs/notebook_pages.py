"""Makes a page of each notebook, with its outputs and pictures; Sphinx's conf.py calls it.

The pages are in docs/notebooks, which git ignores but for its index.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS.parent / "notebooks"


def write(folder: Path = DOCS / "notebooks") -> list[Path]:
    """Write the pages and their pictures into a folder that exists; returns the pages."""
    pages = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        pictures = (f"{path.stem}-{number}.png" for number in range(1, 1 << 20))
        parts = [part for cell in cells for part in _parts(cell, folder, pictures)]
        page = folder / f"{path.stem}.md"
        page.write_text("\n\n".join(parts) + "\n")
        pages.append(page)
    return pages


def _parts(cell: Any, folder: Path, pictures: Iterator[str]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        source = re.sub(r"\]\(\.\./docs/", "](../", source)
        yield re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source)
        return
    # Jupyter's own commands are no Python.
    code = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
    if code.strip():
        yield _fenced("python", code.strip("\n"))
    for output in cell["outputs"]:
        yield from _shown(output, folder, pictures)


def _shown(output: Any, folder: Path, pictures: Iterator[str]) -> Iterator[str]:
    if output["output_type"] == "stream":
        yield _fenced("text", "".join(output["text"]).rstrip("\n"))
        return
    data = output["data"]
    if "image/png" in data:
        picture = next(pictures)
        (folder / picture).write_bytes(base64.b64decode("".join(data["image/png"])))
        yield f"![output of the cell above]({picture})"
    elif "text/html" in data:
        yield _fenced("{raw} html", "".join(data["text/html"]))
    else:
        yield _fenced("text", "".join(data["text/plain"]))


def _fenced(kind: str, text: str) -> str:
    fence = "```" if "```" not in text else "````"
    return f"{fence}{kind}\n{text}\n{fence}"
