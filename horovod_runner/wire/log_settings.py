"""The set-up of Python's logging, as it travels from the driver to the ranks.

Imported in a rank only if the driver's is not Python's default.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class LogHandler(NamedTuple):
    """A handler that prints.

    Attributes:
        level: the least level that it prints.
        text, dates, style: the arguments of ``logging.Formatter``; None for its defaults.
    """

    stream: Literal["stdout", "stderr"]
    level: int
    text: str | None = None
    dates: str | None = None
    style: Literal["%", "{", "$"] = "%"


class LoggerSettings(NamedTuple):
    """What is set of a logger.

    Attributes:
        name: empty for the root.
    """

    name: str
    level: int
    propagate: bool = True
    disabled: bool = False
    handlers: tuple[LogHandler, ...] = ()


class LogSettings(NamedTuple):
    """The settings of all loggers that differ from Python's defaults.

    Attributes:
        disabled: the argument of ``logging.disable``.
        captures_warnings: that of ``logging.captureWarnings``.
        loggers: the root first, if it is among them.
    """

    disabled: int = 0
    captures_warnings: bool = False
    loggers: tuple[LoggerSettings, ...] = ()

    @property
    def has_root(self) -> bool:
        """Whether the user has set up logging in general."""
        return any(not each.name for each in self.loggers)
