"""More ranks than anybody wants to read a line of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_runner import HorovodRunner

_BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def test_what_many_ranks_print_stays_readable(capfd: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        import os

        rank = int(os.environ["HOROVOD_RANK"])
        print("loading")
        if rank == 13:
            raise ValueError("odd label")

    with pytest.raises(ValueError, match="odd label") as caught:
        HorovodRunner(np=-18, driver_log_verbosity="all").run(main)
    out, _ = capfd.readouterr()
    lines = [line for line in out.splitlines() if line.endswith(" loading")]
    assert 1 <= len(lines) < 18
    assert "rank 13 of 18" in caught.value.__notes__[0]


def test_a_driver_loses_nothing_of_many_simulated_ranks(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    command = [sys.executable, str(_BENCHMARK), "--sizes", "50", "--seconds", "1"]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=400)
    (found,) = json.loads(file.read_text())["sizes"]
    assert found["sent"] >= 500
    assert found["taken"] == found["sent"]
    assert "rank 30" in found["error"]
