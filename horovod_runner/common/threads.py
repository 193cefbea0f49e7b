"""Starts threads: each is named after what it does, and keeps no process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread with the name ``horovod_runner-NAME``, for people and debuggers."""
    thread = threading.Thread(target=target, args=args, name=f"horovod_runner-{name}", daemon=True)
    thread.start()
    return thread
