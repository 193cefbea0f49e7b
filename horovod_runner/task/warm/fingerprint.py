"""Names a fork server after everything that its imports depend on and that a fork inherits.

A worker is forked only from a fork server of the same name; otherwise it starts cold.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PREFIX: Final = "warm-"


def server_name(
    owner: int, path: Sequence[str], environment: Mapping[str, str], directory: str
) -> str:
    """The name of the fork server that fits a worker.

    The environment is that of the worker, without the variables of a rank.
    """
    # Computed for each run: an import may write a file that the next import depends on.
    home = environment.get("KERAS_HOME", os.path.expanduser("~/.keras"))
    status = Path("/proc/self/status").read_text()
    depends_on = (
        _start_time(owner),
        os.stat("/proc/self/ns/pid").st_ino,
        sys.executable,
        sys.version,
        list(path),
        [modified(entry) for entry in path if entry.endswith("-packages")],
        modified(os.path.join(home, "keras.json")),
        sorted(environment.items()),
        directory,
        [line for line in status.splitlines() if line.startswith(("Umask", "Cpus_allowed"))],
        os.nice(0),
        Path("/proc/self/limits").read_text(),
    )
    return f"{PREFIX}{owner}-{digest(depends_on)}"


def digest(value: object) -> str:
    """A short hash of a value's repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def modified(path: str) -> int | None:
    """When a file or the listing of a folder was last changed; None if it does not exist."""
    try:
        return os.stat(os.path.expanduser(path)).st_mtime_ns
    except OSError:
        return None


def _start_time(pid: int) -> str:
    """When a process was started, in ticks since the boot: process ids are used again."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
