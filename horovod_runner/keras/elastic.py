"""Stubs for Horovod's elastic training: they raise an error that names the replacement."""

from __future__ import annotations

from typing import Any, NoReturn


def _missing(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "horovod_runner.keras has no elastic training. A run that loses a rank restarts from its "
        "latest checkpoint instead: use HorovodRunner(..., max_restarts=2), and "
        "horovod_runner.keras.callbacks.ReportCallback() in model.fit, which saves and resumes"
    )


run = KerasState = CommitStateCallback = _missing
UpdateBatchStateCallback = UpdateEpochStateCallback = _missing
