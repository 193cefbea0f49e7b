"""Shows the runs of this machine while they go on: ``horovod-runner top``.

Nothing here waits for a driver: it is asked through the run's FIFO (``results/registry.py``) to
write its log, which is read when it has changed. A driver that does not answer is shown as such.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from horovod_runner.common.clocks import elapsed
from horovod_runner.common.text import duration_text
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results import registry, saved_run
from horovod_runner.results.live import Live, live
from horovod_runner.results.registry import Entry, ListedRun
from horovod_runner.results.run_log import LogReader
from horovod_runner.tools.commands.signals import sigterm_raises

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_ASK_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 0.1
_ONCE_SECONDS: Final = 5.0  # for all drivers to answer; with a thousand ranks it takes two
_QUIET_SECONDS: Final = 3.0  # from which a driver without an answer is called so
_AGAIN_SECONDS: Final = 10.0  # between two questions to a driver that does not answer
_LIST_SHARE: Final = 20  # listing takes long where there are many processes: it gets 5% of the time


class Seen(msgspec.Struct):
    """A run as far as it can be seen from here."""

    run_id: str
    problem: str  # why the view is missing or old; empty if all is well
    live: Live | None  # what it was doing when its driver wrote its log last
    entry: Entry | None  # what its driver wrote at the begin; None if only processes are left


@dataclass
class _AskedDriver:
    """A driver that is asked, and its answers."""

    asked: float = 0.0
    since: float | None = None  # when the first question without an answer was asked
    before: object = None  # the version of its log at that question
    log: LogReader | None = None
    view: Live | None = None
    unreadable: str = ""  # why its log cannot be read


class Watch:
    """Asks the drivers of this machine's runs, or of one run, and reads their answers.

    Raises:
        HorovodRunnerError: no run has such an id, or several have.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        find: Callable[[], list[ListedRun]] = registry.find,
        once_seconds: float = _ONCE_SECONDS,
        quiet_seconds: float = _QUIET_SECONDS,
        clock: Callable[[], float] = elapsed,
    ) -> None:
        self._find = find
        self._once_seconds = once_seconds
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._only = None if run is None else registry.find_one(find(), run).run_id
        self._listed: list[ListedRun] = []
        self._list_at = 0.0
        self._drivers = defaultdict[str, _AskedDriver](_AskedDriver)  # by the runs' ids

    def ask(self) -> None:
        """Ask all drivers what their runs are doing now."""
        if time.monotonic() >= self._list_at:
            self._list()
        now = self._clock()
        for run_id in [listed.run_id for listed in self._listed if listed.alive]:
            driver = self._drivers[run_id]
            if driver.since is not None and now - driver.asked < _AGAIN_SECONDS:
                continue
            before = registry.version(saved_run.path_of(run_id))
            if registry.ask_to_write(run_id):
                driver.asked = now
                if driver.since is None:
                    driver.since, driver.before = now, before
            else:  # the run begins or ends at this moment
                self._list_at = 0.0

    def _list(self) -> None:
        began = time.monotonic()
        self._listed = [run for run in self._find() if self._only in (None, run.run_id)]
        now = time.monotonic()
        self._list_at = now + _LIST_SHARE * (now - began)
        alive = {listed.run_id for listed in self._listed if listed.alive}
        for run_id in self._drivers.keys() - alive:
            self._drivers[run_id].since = None

    def read(self) -> bool:
        """Read the logs that were written; returns whether all drivers have answered."""
        waiting = [each for each in self._drivers.items() if each[1].since is not None]
        for run_id, driver in waiting:
            path = saved_run.path_of(run_id)
            if registry.version(path) in (None, driver.before):
                continue
            driver.since = None
            try:
                if driver.log is None:
                    driver.log = LogReader(path)
                else:
                    driver.log.read()
            except HorovodRunnerError as error:
                driver.unreadable = str(error)
            else:
                driver.view = live(driver.log.run)
        return all(driver.since is None for _, driver in waiting)

    def once(self) -> list[Seen]:
        """Ask all drivers once, wait for their answers for some seconds, and return the runs."""
        deadline = time.monotonic() + self._once_seconds
        self.ask()
        while not (self.read() and self._list_at) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS / 2)
            if not self._list_at:
                self.ask()
        return self.seen

    @property
    def ended(self) -> str:
        """How the one run has ended; empty while it goes on, and where all are watched."""
        if self._only is None or self._listed or not self._list_at:
            return ""
        end = saved_run.end_of(self._only)
        if end is None:
            return f"run {self._only} has ended"
        status, error = end
        how = "was cancelled" if status == "cancelled" else f"has {status}"
        return f"run {self._only} {how}{f': {error}' if error and status == 'failed' else ''}"

    @property
    def seen(self) -> list[Seen]:
        """The runs, oldest first; those whose drivers do not answer come last."""
        runs = [
            Seen(run.run_id, self._problem(run), self._drivers[run.run_id].view, run.entry)
            for run in self._listed
        ]
        return sorted(runs, key=lambda seen: bool(seen.problem))

    def _problem(self, run: ListedRun) -> str:
        entry, here = run.entry, len(run.processes)
        are, them = ("es of it are", "them") if here > 1 else (" of it is", "it")
        left = f"{here} process{are} left here: horovod-runner stop {run.run_id} ends {them}"
        if entry is None:
            return f"its driver is gone or on another host, and {left}"
        if run.alive is None:
            return f"its driver is on {entry.host}: run horovod-runner top there"
        driver = f"its driver (process {entry.pid})"
        if run.alive is False:
            return f"{driver} is gone, and {left}"
        asked = self._drivers[run.run_id]
        if asked.unreadable:
            return f"{driver} has another version of horovod_runner: {asked.unreadable}"
        silence = self._silence(asked, entry.pid)
        return silence and f"{driver} {silence}"

    def _silence(self, asked: _AskedDriver, pid: int) -> str:
        """Why a driver that runs does not answer; empty if it does, or was just asked."""
        if asked.since is None:
            return "" if asked.view else "does not listen: its run begins or ends now"
        waited = self._clock() - asked.since
        if waited < self._quiet_seconds:
            return ""
        with suppress(psutil.Error):
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return "is stopped, by SIGSTOP or Ctrl-Z"
        return (
            f"has not answered for {duration_text(waited)}: it is very busy, or its "
            "horovod_runner is older than this command"
        )


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    top = commands.add_parser(
        "top",
        help="show runs while they go on",
        description="Show the runs of this machine and refresh every second: how far they are, "
        "where the time of their ranks goes, memory, the last lines. A q or Ctrl-C quits. Needs "
        "rich: pip install 'horovod_runner[top]'.",
    )
    top.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="show this run in detail: its id as ps shows it, or the start of the id",
    )
    top.add_argument(
        "--once",
        action="store_true",
        help="print once and exit, as where stdout is not a terminal",
    )
    top.add_argument("--json", action="store_true", help="print JSON once; needs no rich")
    top.set_defaults(command=_top)


def _top(options: argparse.Namespace) -> int:
    watch = Watch(options.run)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(watch.once())).decode())
        return 0
    draw = _drawing(detailed=options.run is not None)
    from rich.console import Console

    console = Console(highlight=False)
    if options.once or not console.is_terminal:
        console.print(draw(watch.once(), None))
        return 0
    with suppress(KeyboardInterrupt):
        _show(console, watch, draw)
        if watch.ended:
            print(watch.ended)
    return 0


def _drawing(*, detailed: bool) -> Callable[[list[Seen], int | None], RenderableType]:
    """The function that draws runs in a number of lines of a terminal; None does not limit it."""
    try:
        from horovod_runner.tools.commands import top_view
    except ImportError as error:
        raise HorovodRunnerError(
            f"horovod-runner top draws with rich, which cannot be imported ({error}): pip install "
            "'horovod_runner[top]'. --json needs no rich."
        ) from error
    return top_view.Detail if detailed else top_view.Overview


def _show(
    console: Console, watch: Watch, draw: Callable[[list[Seen], int | None], RenderableType]
) -> None:
    """Draw a picture a second on a screen of its own, until a "q", or the end of the one run."""
    from rich.live import Live as Screen

    with (
        sigterm_raises(SystemExit(128 + signal.SIGTERM)),  # restores the terminal
        _keyboard() as pressed,
        Screen(console=console, screen=True, auto_refresh=False) as screen,
    ):
        while True:
            watch.ask()
            if watch.ended:
                return
            ask_at, drawn = time.monotonic() + _ASK_SECONDS, False
            while (left := ask_at - time.monotonic()) > 0:
                if not drawn and watch.read():
                    screen.update(draw(watch.seen, console.height), refresh=True)
                    drawn = True
                if "q" in pressed(left if drawn else min(left, _TICK_SECONDS)).lower():
                    return
            if not drawn:
                screen.update(draw(watch.seen, console.height), refresh=True)


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for keys, and returns them.

    Meanwhile keys are not echoed, and Ctrl-Z does nothing: it would leave the terminal as it is.
    """
    if not sys.stdin.isatty():
        yield _no_keys
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        if not select.select([terminal], [], [], seconds)[0]:
            return ""
        return os.read(terminal, 64).decode(errors="replace") or "q"  # the terminal was closed

    try:
        tty.setcbreak(terminal)
        changed = termios.tcgetattr(terminal)
        changed[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(terminal, termios.TCSANOW, changed)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""
