"""The folder where this user's runs are listed and recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: What to do if the folder's disk is full.
MORE_ROOM: Final = "Free space there, or set XDG_STATE_HOME to a folder on another disk."


def state_folder() -> Path:
    """``$XDG_STATE_HOME/horovod_runner`` or ~/.local/state/horovod_runner.

    Raises:
        RuntimeError: there is no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "horovod_runner")
