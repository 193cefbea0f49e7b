"""Records which lines of the package each test runs, in its ranks and Spark's workers too.

    COVERAGE_CORE=sysmon pytest tests -p tests.lines_by_test --lines-by-test FOLDER

Each process of pytest-xdist writes two files there, for coverage.py and for `tests/choose.py`:
.coverage.NAME has the lines, with the test as their context, and NAME.seconds how long each test
took. `coverage combine` makes one file of the former. A process that outlives its test is counted
for the test during which it ends.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
from coverage.sqldata import CoverageData

from tests.suites import FAST, NAME

PACKAGE = str(Path(__file__).parents[1] / "horovod_runner")
SETTINGS = str(Path(__file__).parents[1] / "setup.cfg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lines-by-test", metavar="FOLDER", type=Path, help="see tests/lines_by_test.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--lines-by-test")
    # With pytest-xdist the tests run in its workers, which have a workerinput.
    controls = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if folder is not None and not controls:
        config.pluginmanager.register(_Recorder(folder.resolve()))


def _subject(item: pytest.Item) -> str:
    """The context of a test's lines: its id, or for a fast test its file."""
    name = item.stash[NAME]
    return name.partition("::")[0] if name.startswith(FAST) else name


class _Recorder:
    def __init__(self, folder: Path) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        self._parts = folder / name
        self._parts.mkdir(parents=True, exist_ok=True)
        self._seconds = folder / f"{name}.seconds"
        self._lines = CoverageData(str(folder / f".coverage.{name}"))
        # Python processes that this one starts record what they run.
        for_children = self._coverage()
        for_children.start()
        for_children.stop()
        self._running: coverage.Coverage | None = None
        self._begin = 0.0

    def _coverage(self) -> coverage.Coverage:
        return coverage.Coverage(str(self._parts / "part"), config_file=SETTINGS)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        if self._running is None:
            # A new object each time: one that starts again does not see code that it knows.
            self._running = self._coverage()
            self._running.set_option("run:patch", [])  # done before
            self._running.start()
            self._begin = time.monotonic()
        yield
        if nextitem is None or _subject(nextitem) != _subject(item):
            self._running.stop()
            self._running.save()
            self._running = None
            with self._seconds.open("a") as file:
                file.write(f"{time.monotonic() - self._begin:.2f} {_subject(item)}\n")
            self._lines.set_context(_subject(item))
            self._lines.add_lines(self._collect())

    def _collect(self) -> dict[str, set[int]]:
        """What was written since the last test."""
        found: dict[str, set[int]] = defaultdict(set)
        for path in self._parts.glob("part.*"):
            data = CoverageData(str(path))
            try:
                data.read()
                for file in data.measured_files():
                    # A process that is killed while it writes leaves other names.
                    if file and file.startswith(PACKAGE):
                        found[file] |= {*(data.lines(file) or ())}
            except coverage.CoverageException:
                continue  # a process is writing it, or was killed while it did
            finally:
                data.close()
            path.unlink(missing_ok=True)
        return found
