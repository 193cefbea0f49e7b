"""The lab notebook, from its first cell to its last, with the data that are always there."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.horovod
ROOT = Path(__file__).parents[2]


def test_the_lab_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("FASHION_MNIST", raising=False)
    # Where nothing was downloaded before, and nothing can be.
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    notebook = nbformat.read(ROOT / "notebooks" / "fashion_mnist_keras.ipynb", 4)
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "the handwritten digits stand in" in shown
    kernels = re.findall(r"rank \d of 2, local_rank \d: kernel ([+-]\S+), then ([+-]\S+)", shown)
    assert kernels[0][0] == kernels[0][1] == kernels[1][1] != kernels[1][0]
    accuracies = [float(found) for found in re.findall(r"np = \d: .* accuracy (\S+)%", shown)]
    assert len(accuracies) == 2
    assert min(accuracies) > 85
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
