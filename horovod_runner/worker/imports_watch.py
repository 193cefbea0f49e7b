"""Records which frameworks a worker imports, so that the next run can preload them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from horovod_runner.common.options import FRAMEWORKS
from horovod_runner.worker import environ_watch
from horovod_runner.worker.checks.notes import from_library

# Variables that C libraries read when they are loaded, which Python cannot observe.
_READ_BY_LIBRARIES = ("KMP_", "MKL_", "NPY_", "OMP_", "OPENBLAS_", "TF_NUM_")
_ADVICE = "Set it with HorovodRunner(env={{{name!r}: ...}}), which comes before any import"


class ImportsWatch:
    """Watches a worker's imports and environment variables from its construction on."""

    def __init__(self, *, forked: bool, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._forked = forked
        # What the fork server's imports looked for, and did not find.
        self._missed = frozenset(environ_watch.missed)
        # The first variable that main set, and the frameworks that were imported by then.
        self._first: tuple[str, list[str]] | None = None
        environ_watch.watch(self._on_set)

    def _on_set(self, name: str) -> None:
        if environ_watch.importing(FRAMEWORKS):
            return  # a framework sets it by itself, in every process
        self._first = self._first or (name, _imported_frameworks())
        is_read = name in self._missed or name.startswith(_READ_BY_LIBRARIES)
        if self._forked and is_read and not from_library():
            self._notify(
                f"HorovodRunner: main sets {name} too late: this rank was forked with its "
                f"frameworks imported (preload_frameworks=True). {_ADVICE.format(name=name)}"
            )

    def preloadable(self, *, quiet: bool = False) -> tuple[str, ...]:
        """The frameworks that the next run can preload, in the order of their import.

        Those that were imported after ``main`` had set a variable are left out, with a notice
        unless ``quiet``.
        """
        imported = _imported_frameworks()
        if self._first is None:
            return tuple(imported)
        name, earlier = self._first
        later = [module for module in imported if module not in earlier]
        if later and not quiet:
            self._notify(
                f"HorovodRunner: main sets {name} before it imports {', '.join(later)}, so "
                f"preload_frameworks=True does not preload them. {_ADVICE.format(name=name)}"
            )
        return tuple(earlier)


def _imported_frameworks() -> list[str]:
    return [name for name in list(sys.modules) if name in FRAMEWORKS]  # a thread may import
