"""Where Horovod's elastic training was: a run that lost a rank is launched anew here."""

from __future__ import annotations

from typing import Any, NoReturn


def _missing(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "elastic training is not part of horovod_runner.keras: a run that loses a rank is launched "
        "again from its latest checkpoint. Use HorovodRunner(..., max_restarts=2), and "
        "horovod_runner.keras.callbacks.ReportCallback() in model.fit, which saves and goes on"
    )


run = KerasState = CommitStateCallback = _missing
UpdateBatchStateCallback = UpdateEpochStateCallback = _missing
