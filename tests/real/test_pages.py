"""The first Python code block of README and docs pages, run as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.horovod

ROOT = Path(__file__).parents[2]
#: The last line that each program prints, as a pattern.
PRINTED = {
    "README.md": r"144 +145 +0\.\d+",
    "docs/index.md": r"\d\.\d+(e-\d+)?",
    "docs/checkpoints.md": r"49 +100 +\d\.\d+(e-\d+)?",
    "docs/collectives.md": r"1\.0 gloo",
    "docs/data.md": r"\{'error': \d\.\d+(e-\d+)?\}",
    "docs/gpu.md": r"\[.*\]",
    "docs/handle.md": r"loss 0\.\d+",
    "docs/torch_distributed.md": r"\('hvd', 0\.\d+\)",
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_first_program_of_a_page_runs(page: str, tmp_path: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    assert block is not None
    program = tmp_path / "program.py"
    program.write_text(block[1])
    done = subprocess.run(
        [sys.executable, program.name],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[page], done.stdout.splitlines()[-1]), done.stdout
