"""Selects the entries of the driver's sys.path that a rank gets."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable


def user_path(path: tuple[str, ...]) -> list[str]:
    """The entries of the driver's ``sys.path`` that a task adds to its ``sys.path``.

    These are the folders of the user's modules that exist on this host too. The driver's installed
    packages are left out: they may belong to another Python.
    """
    installed = tuple(filter(None, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    entries = [os.path.abspath(entry) for entry in path]
    return [
        entry
        for entry in entries
        if entry not in sys.path
        and os.path.exists(entry)
        and not _is_installation(entry, installed)
    ]


def _is_installation(entry: str, installed: tuple[str, ...]) -> bool:
    folders = {"site-packages", "dist-packages"}
    return entry.startswith(installed) or not folders.isdisjoint(entry.split(os.sep))


def without_spark_core(path: Iterable[str]) -> list[str]:
    """A Python path without spark-core's jar.

    Spark adds it for its tasks. It holds no Python, and every start of an interpreter would search
    its 15 MB.
    """
    return [entry for entry in path if not os.path.basename(entry).startswith("spark-core_")]
