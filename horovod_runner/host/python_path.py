"""Selects the entries of the driver's sys.path that a rank gets."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence


def rank_path(path: Sequence[str], directory: str) -> list[str]:
    """The ``sys.path`` of a rank whose task is this process, from the driver's path and directory.

    It has the entries of this process, and those of the driver that exist on this host. Entries
    before the driver's installed packages come first here, too. The driver's installed
    packages are left out: they may belong to another Python.
    """
    installed = tuple(filter(None, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    before: list[str] = []
    after: list[str] = []
    chosen = before
    for entry in (os.path.abspath(os.path.join(directory, entry)) for entry in path):
        if _is_installation(entry, installed):
            chosen = after
        elif entry not in sys.path and os.path.exists(entry):
            chosen.append(entry)
    return [*before, *without_spark_core(sys.path), *after]


def _is_installation(entry: str, installed: tuple[str, ...]) -> bool:
    folders = {"site-packages", "dist-packages"}
    return entry.startswith(installed) or not folders.isdisjoint(entry.split(os.sep))


def without_spark_core(path: Iterable[str]) -> list[str]:
    """A Python path without spark-core's jar.

    Spark adds it for its tasks. It holds no Python, and every start of an interpreter would search
    its 15 MB.
    """
    return [entry for entry in path if not os.path.basename(entry).startswith("spark-core_")]
