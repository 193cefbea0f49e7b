"""Engines started for real on this machine, each by a small starter of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

#: What engines download and build once.
CACHE = Path.home() / ".cache" / "horovod_runner" / "engines"


class EngineError(Exception):
    """The engine cannot be had or has failed; the text says in one line what is missing."""


@contextmanager
def required(engine: AbstractContextManager[Any]) -> Iterator[Any]:
    """An engine that is started for tests; they end where it cannot be had."""
    try:
        with engine as running:
            yield running
    except EngineError as error:
        pytest.exit(str(error), returncode=1)
