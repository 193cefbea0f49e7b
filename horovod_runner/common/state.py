"""The folder where this user's runs are listed and recorded."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """``$XDG_STATE_HOME/horovod_runner`` or ~/.local/state/horovod_runner.

    Raises:
        RuntimeError: there is no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "horovod_runner")
