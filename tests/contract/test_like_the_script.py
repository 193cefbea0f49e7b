"""A rank is like the script or notebook that started it: its `__main__`, logging, folder, path."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]

_SCRIPT = """
import functools, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor

shared = {"key": "value"}
factor = None
counter = 0

class Point:
    def __init__(self, x):
        self.x = x

class OnlyInAnArgument(Point):
    pass

class Heavy:
    def __setstate__(self, state):
        assert multiprocessing.parent_process() is None, "an argument was loaded in a child"

    def __getstate__(self):
        return {"large": 1}

def start(value):
    global factor
    factor = value

def times(x):
    return Point(x * factor)

def again(points):
    with multiprocessing.get_context("spawn").Pool(1, start, (10,)) as pool:
        return [times.x for times in pool.map(times, [point.x for point in points])]

@functools.lru_cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Tenfold:
    def __call__(self, x):
        return 10 * x

tenfold = functools.lru_cache(Tenfold())

def main(context, points, heavy):
    fresh = multiprocessing.get_context(context)
    with fresh.Pool(1, start, (3,)) as pool:
        made = pool.map(times, [1, 2])
    with ProcessPoolExecutor(1, fresh) as pool:
        tens = pool.submit(again, points).result()
        cached = tenfold(pool.submit(fibonacci, 20).result())
    return [type(each) is Point for each in made], [each.x for each in made], tens, cached

def module(given):
    global counter
    this = sys.modules[__name__]
    counter += 1
    this.counter += 1
    return given is shared, counter, this.module is module, __file__
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A script's module as the ``__main__`` of this process."""
    main = types.ModuleType("__main__")
    main.__file__ = "/not/on/any/host/train.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(_SCRIPT, vars(main))
    return main


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_processes_that_a_rank_starts_anew_have_the_scripts_classes(
    ranks: Ranks, script: Any, context: str
) -> None:
    """Also those of an argument, and in processes that they start themselves."""
    given = {"points": [script.OnlyInAnArgument(4)], "heavy": script.Heavy()}
    found = ranks.run(1, script.main, context=context, **given)
    assert found == ([True, True], [3, 6], [40], 67650)


def test_main_is_a_real_module(ranks: Ranks, script: Any) -> None:
    """What it holds is what its functions see; and an argument that they use is the same object."""
    assert ranks.run(1, script.module, given=script.shared) == (True, 2, True, script.__file__)


@pytest.fixture
def default_logging() -> Iterator[None]:
    """Python's set-up of logging, but for pytest's own handlers."""
    level = logging.root.level
    before = list(logging.root.handlers)
    logging.root.setLevel(logging.WARNING)
    yield
    for name in ("", "noisy", "own"):
        logging.getLogger(name or None).setLevel(logging.NOTSET)
        logging.getLogger(name or None).handlers.clear()
    logging.getLogger("own").propagate = True
    logging.root.setLevel(level)
    logging.root.handlers[:] = before


def _add_handler(name: str, handler: logging.Handler, level: int, text: str) -> None:
    handler.setFormatter(logging.Formatter(text))
    logging.getLogger(name or None).addHandler(handler)
    logging.getLogger(name or None).setLevel(level)


def _log() -> None:
    logging.getLogger("any").info("any %s", "info")
    logging.getLogger("noisy").warning("noisy")
    logging.getLogger("own").debug("own debug")


@pytest.mark.usefixtures("default_logging")
def test_ranks_log_and_warn_as_the_driver_is_set_up_to(
    ranks: Ranks, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def main() -> None:
        _log()
        warnings.warn("that the driver ignores", stacklevel=1)
        warnings.warn("ignored by Python, too", DeprecationWarning, stacklevel=1)
        warnings.warn("that is seen", stacklevel=1)
        logging.basicConfig(level=logging.INFO, format="set in main|%(message)s")
        _log()

    file = logging.FileHandler(tmp_path / "log")
    _add_handler("", file, logging.INFO, "%(levelname)s|%(message)s")
    logging.getLogger("noisy").setLevel(logging.ERROR)
    _add_handler("own", logging.StreamHandler(sys.stdout), logging.DEBUG, "own|%(message)s")
    logging.getLogger("own").propagate = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "that the driver ignores")
        warnings.simplefilter("ignore", DeprecationWarning)  # before pytest's own filter
        ranks.run(1, main, {"driver_log_verbosity": "all"})
    out, err = capfd.readouterr()
    assert out.splitlines() == ["own|own debug"] * 2
    assert "ignored by Python" not in err
    seen = [line for line in err.splitlines() if "info" in line or "UserWarning" in line]
    assert seen[::2] == ["INFO|any info", "set in main|any info"]
    assert "that is seen" in seen[1]
    file.close()


@pytest.mark.usefixtures("default_logging")
def test_a_handler_that_main_adds_takes_the_place_of_the_drivers(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        _add_handler("own", logging.StreamHandler(), logging.INFO, "in main|%(message)s")
        logging.getLogger("own").info("once")

    _add_handler("", logging.StreamHandler(), logging.INFO, "driver|%(message)s")
    _add_handler("own", logging.StreamHandler(), logging.INFO, "driver|%(message)s")
    ranks.run(1, main, {"driver_log_verbosity": "all"})
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "once" in line] == ["in main|once"]


@pytest.mark.places("local", "spark", "cluster", "connect")
def test_ranks_on_the_drivers_host_share_its_folder_and_its_path(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "beside_the_script.py").write_text("VALUE = 17")
    (tmp_path / "modules" / "tqdm.py").write_text("VALUE = 'not the library'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["modules", *sys.path])

    def main() -> tuple[str, int, str]:
        import beside_the_script  # type: ignore[import-not-found]
        import tqdm

        return os.getcwd(), beside_the_script.VALUE, tqdm.VALUE  # type: ignore[attr-defined]

    assert ranks.run(1, main) == (str(tmp_path), 17, "not the library")


def test_what_asks_for_a_terminal_says_that_a_rank_has_none(ranks: Ranks) -> None:
    def main() -> list[str]:
        import getpass
        import io
        import pdb

        def post_mortem() -> None:
            try:
                raise ValueError
            except ValueError:
                pdb.post_mortem()

        said = []
        for ask in (input, getpass.getpass, breakpoint, post_mortem):
            try:
                ask()
            except (EOFError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        sys.stdin = io.StringIO("given in main\n")
        said.append(input())
        commands = io.StringIO("p 40 + 2\nc\n")
        shown = io.StringIO()
        pdb.Pdb(stdin=commands, stdout=shown).set_trace()  # as debuggers over a socket do
        said.append(str("42" in shown.getvalue()))
        sys.stdin = io.StringIO("p len(said)\nc\n")
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            breakpoint()
        said.append(shown.getvalue())
        return said

    asked, secret, *debuggers, typed, over_a_stream, in_main = ranks.run(1, main)
    assert asked.startswith("EOFError: input() was called in rank 0 of 1 (process ")
    assert "run(main, name=answer)" in asked
    assert secret.startswith("EOFError: getpass() was called in rank 0 of 1")
    assert len(debuggers) == 2
    for said in debuggers:
        assert said.startswith("RuntimeError: a debugger was started in rank 0 of 1 (process ")
        assert "dump_stacks()" in said
    assert (typed, over_a_stream) == ("given in main", "True")
    assert "(Pdb) 6" in in_main


@pytest.mark.places("spark", "slurm")
def test_that_output_is_hidden_is_said_once(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(2, lambda: print("hidden\nand more"))
    ranks.run(2, lambda: None)
    out, err = capsys.readouterr()
    assert "hidden" not in out
    assert err.count('driver_log_verbosity="all" shows it') == 1
