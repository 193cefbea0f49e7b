"""Records which lines of the package each test runs, in its ranks and Spark's workers too.

    COVERAGE_CORE=sysmon pytest tests -p tests.lines_by_test --lines-by-test FOLDER

Each process of pytest-xdist appends to a file of its own in FOLDER, a JSON object in each line: the
test, its seconds, and the lines by file. What a process that outlives its test runs is counted for
the test during which it ends. `tests/choose.py` reads the files.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
from coverage.sqldata import CoverageData

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines-by-test", metavar="FOLDER", type=Path, help=__doc__)


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--lines-by-test")
    # With pytest-xdist the tests run in its workers, which have a workerinput.
    controls = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if folder is not None and not controls:
        config.pluginmanager.register(_Recorder(folder.resolve()))


class _Recorder:
    def __init__(self, folder: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{worker}.jsonl"
        self._data = folder / worker
        self._data.mkdir(exist_ok=True)
        # Python processes that this one starts record what they run.
        started = self._coverage(children=True)
        started.start()
        started.stop()

    def _coverage(self, *, children: bool = False) -> coverage.Coverage:
        made = coverage.Coverage(str(self._data / "lines"), config_file=str(ROOT / "setup.cfg"))
        if not children:  # once is enough
            made.set_option("run:patch", [])
        return made

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # One object for each test: a second start of the same would not see known code again.
        running = self._coverage()
        begin = time.monotonic()
        running.start()
        yield
        running.stop()
        running.save()
        seconds = time.monotonic() - begin
        row = {"test": item.nodeid, "seconds": round(seconds, 2), "lines": self._collect()}
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _collect(self) -> dict[str, list[int]]:
        found: dict[str, set[int]] = defaultdict(set)
        for path in self._data.glob("lines.*"):
            data = CoverageData(basename=str(path), no_disk=False)
            try:
                data.read()
                for name in data.measured_files():
                    found[name.rpartition("/horovod_runner/")[2]] |= {*(data.lines(name) or ())}
                data.close()
            except coverage.CoverageException:
                continue  # a process is writing it, or was killed while it did
            path.unlink(missing_ok=True)
        return {name: sorted(lines) for name, lines in sorted(found.items()) if lines}
