"""Shows an error of the ranks in a notebook: what is long is in a box to open.

The traceback ends at the user's line: the frames of this package below it tell nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from html import escape
from traceback import format_exception
from types import TracebackType
from typing import Any, Final

from horovod_runner.errors import HorovodRunnerError, RankFailedError
from horovod_runner.sinks.streams import in_notebook

_PACKAGE: Final = __name__.partition(".")[0] + "."
_LONG: Final = 25  # lines, from which an error is folded
_LONG_PART: Final = 8  # lines, from which a paragraph of it is shortened
_FIRST: Final = 1  # of such a paragraph: its title
_LAST: Final = 4  # of a traceback: the line of the mistake, and the exception


def fold_error(error: BaseException) -> None:
    """Let a notebook show an error of the ranks in short, if it shows the error at all.

    Does nothing elsewhere.
    """
    # Some exceptions show themselves already.
    if in_notebook() and not hasattr(type(error), "_render_traceback_"):
        with suppress(Exception):  # of an exception whose attributes cannot be set
            error._render_traceback_ = _Folded(error)  # type: ignore[attr-defined]


class _Folded:
    """IPython calls this in place of its own formatting, in the cell that shows the error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        # Numbers of the cells that have the box: IPython asks twice, also for its history.
        self._shown_in: set[int] = set()

    def __call__(self) -> Any:
        try:
            return _render(self._error, self._shown_in)
        except Exception:  # another IPython than the tested ones: the error is shown in any case
            return format_exception(self._error)

    def __reduce__(self) -> tuple[Any, ...]:
        # The error may be pickled for a process that lacks this package.
        return partial, (format_exception, self._error)


def _long_one(error: BaseException) -> BaseException:
    """The exception in the chain that has the rank's traceback."""
    cause = error.__cause__
    return cause if isinstance(cause, RankFailedError) else error


def _render(error: BaseException, shown_in: set[int]) -> Any:
    """Show a long error in a box to open, and return the short one for IPython to print."""
    whole = str(_long_one(error))
    shell = sys.modules["IPython"].get_ipython()
    formatter, cell = shell.InteractiveTB, shell.execution_count
    traceback = until_package(error.__traceback__)
    if len(whole.splitlines()) < _LONG:
        return formatter.structured_traceback(type(error), error, traceback)
    if cell not in shown_in:
        from IPython.display import display

        shown_in.add(cell)
        html = (
            "<details><summary>the whole error, with the traceback on the rank</summary>"
            f'<pre style="white-space:pre-wrap">{escape(whole)}</pre></details>'
        )
        display({"text/html": html, "text/plain": whole}, raw=True)
    with shortened(error) as shown:
        return formatter.structured_traceback(type(shown), shown, traceback)


def until_package(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback up to the call of this package; None if it begins there."""
    users: list[TracebackType] = []
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith(_PACKAGE):
            break
        users.append(traceback)
        traceback = traceback.tb_next
    found = None
    for each in reversed(users):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


@contextmanager
def shortened(error: BaseException) -> Iterator[BaseException]:
    """The error with its long paragraphs, or those of its cause, cut in the middle.

    A user's exception cannot be copied in general: it has the short cause only for this time.
    """
    long = _long_one(error)
    short = copy(long)
    short.args = ("\n\n".join(_short(part) for part in str(long).split("\n\n")),)
    if long is error:
        short.__cause__ = error.__cause__
        yield short
        return
    error.__cause__ = short
    try:
        yield error
    finally:
        error.__cause__ = long


def _short(part: str) -> str:
    lines = part.splitlines()
    if len(lines) <= _LONG_PART:
        return part
    left_out = len(lines) - _FIRST - _LAST
    middle = f"  | ... {left_out} lines are folded: see the whole error above"
    return "\n".join([*lines[:_FIRST], middle, *lines[-_LAST:]])


def from_ranks(error: BaseException) -> bool:
    """Whether an error says what happened on the ranks: its traceback here tells nothing."""
    return isinstance(error, HorovodRunnerError) or isinstance(error.__cause__, RankFailedError)
