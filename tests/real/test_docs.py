"""The documentation builds, with every warning an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
ROOT = Path(__file__).parents[2]


# Slow: Sphinx reads all pages and all docstrings.
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "reference" / "api.html").read_text()
    for name in ("HorovodRunner.run", "save_checkpoint", "spmd.prepare_data", "errors.SlotError"):
        assert f'id="horovod_runner.{name}"' in api
