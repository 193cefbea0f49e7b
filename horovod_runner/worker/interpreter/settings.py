"""Applies what Python is set up to on the driver: logging and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from horovod_runner.worker.imports.finder import when_imported
from horovod_runner.worker.interpreter import warning_filters

if TYPE_CHECKING:
    from horovod_runner.wire.log_settings import LogSettings

#: The arguments of :func:`apply`, for processes that this one starts.
applied: tuple[LogSettings | None, Sequence[warning_filters.Filter]] = None, ()


def taken() -> tuple[LogSettings | None, tuple[warning_filters.Filter, ...]]:
    """The settings of this process, as :func:`apply` takes them."""
    from horovod_runner.worker.interpreter import logs

    try:
        return logs.taken(), warning_filters.taken()
    except Exception:  # of a handler or filter that nobody has thought of: ranks do without
        return None, ()


def apply(log_settings: LogSettings | None, filters: Sequence[warning_filters.Filter]) -> None:
    """Set up warnings, and logging once it is imported; None leaves logging as it is."""
    global applied  # noqa: PLW0603 - a process is set up once
    applied = log_settings, filters
    warning_filters.apply(filters)

    def set_up_logging() -> None:
        from horovod_runner.worker.interpreter import logs

        with suppress(Exception):  # it must not fail the user's import of logging
            if log_settings is not None:
                logs.apply(log_settings)

    if log_settings is not None:
        when_imported("logging", set_up_logging)
