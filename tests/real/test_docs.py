"""The documentation builds, with every warning an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, run

pytest.importorskip("sphinx")


# Slow: Sphinx reads all pages and all docstrings.
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    done = run(*sphinx, ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "reference" / "api.html").read_text()
    for name in ("HorovodRunner.run", "save_checkpoint", "spmd.prepare_data", "errors.SlotError"):
        assert f'id="horovod_runner.{name}"' in api
