"""A framework that lacks what an import hook looks for is imported, and the user is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Ranks

# On Spark a module of the driver's folders does not replace one that the executors have installed.
pytestmark = pytest.mark.places("local")


def test_the_driver_shows_once_what_a_run_does_without(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("__version__ = '99.0'")
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("__version__ = '77.0'")
    (tmp_path / "accelerate" / "state.py").write_text("class PartialState:\n    pass")
    monkeypatch.syspath_prepend(tmp_path)

    def main() -> str:
        import accelerate.state
        import mlflow

        return f"{mlflow.__version__} {accelerate.state.PartialState.__name__}"

    assert ranks.run(2, main) == "99.0 PartialState"
    lines = [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line]
    assert len(lines) == 2
    gone, moved = sorted(lines)
    assert "accelerate 77.0. In this run Accelerate takes gloo on CPUs" in gone
    assert "PartialState has no attribute _prepare_backend" in gone
    assert "mlflow 99.0. In this run what ranks log to MLflow makes runs of its own" in moved
    assert "there is no module mlflow.tracking.fluent" in moved
