"""Sets up Python's logging in a rank as it is on the driver.

Carries levels, and what handlers that print do: stream, level and format. A handler that writes to
a file of the driver, or to the notebook by `rich`, prints to the rank's stderr instead. Other
handlers, filters, and formatters that need more than a record are the driver's own. Installed
packages set up their own loggers when a rank imports them: of those, levels alone are carried.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from horovod_runner.wire.log_settings import LoggerSettings, LogHandler, LogSettings
from horovod_runner.worker.imports.patches import instead_of

_STYLES: dict[type, Literal["%", "{", "$"]] = {
    logging.PercentStyle: "%",
    logging.StrFormatStyle: "{",
    logging.StringTemplateStyle: "$",
}
# Not those of other classes: a library that makes them would find ours in their place.
_LOGGERS = (logging.Logger, logging.RootLogger)
# Their handlers write for people: the console, or a file.
_HANDLERS = ("logging", "logging.handlers", "rich.logging")
_PACKAGES = "-packages" + os.sep


def taken() -> LogSettings | None:
    """The settings of this process; None if they are Python's defaults."""
    loggers = []
    known = {str(name): each for name, each in logging.root.manager.loggerDict.items()}
    for name, logger in [("", logging.root), *sorted(known.items())]:
        if not isinstance(logger, logging.Logger) or type(logger) not in _LOGGERS:
            continue
        found = LoggerSettings(name, logger.level)
        if not _is_of_library(name):
            handlers = _printing(logger.handlers)
            propagate, disabled = bool(logger.propagate), bool(logger.disabled)
            found = LoggerSettings(name, logger.level, propagate, disabled, handlers)
        if found != LoggerSettings(name, logging.NOTSET if name else logging.WARNING):
            loggers.append(found)
    captures = getattr(logging, "_warnings_showwarning", None) is not None
    settings = LogSettings(logging.root.manager.disable, captures, tuple(loggers))
    return None if settings == LogSettings() else settings


def _is_of_library(name: str) -> bool:
    """Whether an installed package has this name: it gives its loggers their handlers itself."""
    module = sys.modules.get(name.partition(".")[0])
    return _PACKAGES in (getattr(module, "__file__", None) or "")


def _printing(handlers: list[logging.Handler]) -> tuple[LogHandler, ...]:
    """What is carried of a logger's handlers: those of the console, or one in place of a file's."""
    known = [each for each in handlers if type(each).__module__ in _HANDLERS]
    shown = [
        LogHandler(stream, each.level, *_format(each.formatter))
        for each in known
        if type(each) is logging.StreamHandler and (stream := _stream(each.stream)) is not None
    ]
    others = [
        LogHandler("stderr", each.level, *_format(each.formatter))
        for each in known
        if isinstance(each, logging.FileHandler) or type(each).__module__ == "rich.logging"
    ]
    return tuple(shown or others[:1])


def _stream(stream: Any) -> Literal["stdout", "stderr"] | None:
    """Which of this process's streams it is, or was; None for another one."""
    name = getattr(stream, "name", None)
    if stream in (sys.stdout, sys.__stdout__) or name in ("<stdout>", "stdout"):
        return "stdout"
    is_stderr = stream in (sys.stderr, sys.__stderr__) or name in ("<stderr>", "stderr")
    return "stderr" if is_stderr else None


def _format(formatter: Any) -> tuple[str | None, str | None, Literal["%", "{", "$"]]:
    """The arguments that make a formatter; those of the default where they alone are not enough."""
    if formatter is None:
        return None, None, "%"
    with suppress(Exception):  # a subclass may need names that no record has
        text, dates = str(formatter._fmt), formatter.datefmt and str(formatter.datefmt)
        style = _STYLES[type(formatter._style)]
        plain = logging.Formatter(text, dates, style)
        plain.format(logging.LogRecord("", logging.INFO, "", 0, "", (), None))
        return text, dates, style
    return logging.BASIC_FORMAT, None, "%"


class DriversHandler(logging.StreamHandler[Any]):
    """A handler that is set up as one of the driver's.

    Silent for a logger that main has given a handler that prints, so that no line comes twice.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        if not _has_own(logging.getLogger(record.name)):
            super().emit(record)


def _has_own(logger: logging.Logger | None) -> bool:
    """Whether a logger prints by a handler that main has made."""
    while logger is not None:
        for handler in logger.handlers:
            is_own = not isinstance(handler, DriversHandler | logging.FileHandler)
            if is_own and isinstance(handler, logging.StreamHandler) and _stream(handler.stream):
                return True
        logger = logger.parent if logger.propagate else None
    return False


def apply(settings: LogSettings) -> None:
    """Set up this process's logging.

    ``logging.basicConfig`` with arguments then replaces what is set up here, where main calls it.
    """
    logging.disable(settings.disabled)
    logging.captureWarnings(settings.captures_warnings)
    for each in settings.loggers:
        logger = logging.getLogger(each.name or None)
        logger.setLevel(each.level)
        logger.propagate, logger.disabled = each.propagate, each.disabled
        for given in each.handlers:
            handler = DriversHandler(sys.stdout if given.stream == "stdout" else sys.stderr)
            handler.setLevel(given.level)
            if given.text is not None or given.dates is not None:
                handler.setFormatter(logging.Formatter(given.text, given.dates, given.style))
            logger.addHandler(handler)
    if logging.root.handlers:
        _let_main_configure()


def _let_main_configure() -> None:
    """Let ``basicConfig`` of main take effect; that of a library has none, as on the driver."""

    @instead_of(logging, "basicConfig")
    def basic_config(plain: Callable[..., None], **options: Any) -> None:
        ours = [each for each in logging.root.handlers if isinstance(each, DriversHandler)]
        if options and len(ours) == len(logging.root.handlers) and not _from_a_library():
            for handler in ours:
                logging.root.removeHandler(handler)
        plain(**options)


def _from_a_library() -> bool:
    """Whether an installed package has called ``basicConfig``."""
    return _PACKAGES in sys._getframe(3).f_code.co_filename
