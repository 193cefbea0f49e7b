"""The lab notebook, from its first cell to its last, with the data that are always there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebooks import run

pytestmark = pytest.mark.horovod


# Slow: a whole lab: Keras learns Fashion-MNIST on one rank and on several.
def test_the_lab_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASHION_MNIST", raising=False)
    # Where nothing was downloaded before, and nothing can be.
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    folder = tmp_path / "lab"
    folder.mkdir()
    shown = run("fashion_mnist_keras", folder, monkeypatch)
    assert "the handwritten digits stand in" in shown.text
    steps = r"rank \d of 2, local_rank \d: kernel ([+-]\S+), then ([+-]\S+)"
    kernels = re.findall(steps, shown.text)
    assert kernels[0][0] == kernels[0][1] == kernels[1][1] != kernels[1][0]
    accuracies = [float(found) for found in re.findall(r"np = \d: .* accuracy (\S+)%", shown.text)]
    assert len(accuracies) == 2
    assert min(accuracies) > 85
    assert shown.pictures == 1
