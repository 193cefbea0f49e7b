"""`horovod-runner run`: runs a script or function as ranks, and returns a shell's exit status."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tokenize
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module, util
from pathlib import Path
from typing import Any

from horovod_runner.common.options import StartedBy, grouped
from horovod_runner.errors import CancelledError, GpuError, RankFailedError
from horovod_runner.launchers.sessions import open_session
from horovod_runner.run.runner import HorovodRunner
from horovod_runner.tools.commands import run_options
from horovod_runner.tools.commands.signals import sigterm_raises
from horovod_runner.worker.script import Imported, Script

TERMINATED = 143  # a shell's convention: 128 plus the number of the signal


class UsageError(Exception):
    """The command line names something that does not exist, or contradicts itself."""


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    run_command = commands.add_parser(
        "run",
        help="run a script, or a function, as ranks",
        usage="%(prog)s [options] TARGET [-- ARGUMENT...]",
        description="Run a Python file, or a function of a file or module, on every rank. "
        "Arguments after the -- are in its sys.argv. A function is called without arguments; its "
        "return value on rank 0 is printed. The exit status is 0, the exit code of the first rank "
        "that failed, or 128 plus the number of the signal that killed it; 130 after Ctrl-C, 143 "
        "after SIGTERM or `horovod-runner stop`.",
        epilog="With --np above 0, ranks start in the Slurm allocation that this command runs in, "
        "or otherwise on Spark; below 0, as processes on this machine.",
    )
    run_command.add_argument(
        "target",
        metavar="TARGET",
        help="train.py (as with python), train.py:main or package.module:main",
    )
    run_command.add_argument(
        "--np",
        type=run_options.ranks_or_range,
        metavar="N",
        help="number of ranks: above 0 on Spark or Slurm, below 0 on this machine (default: all "
        "tasks of the Slurm allocation, or -1 outside one). LEAST:MOST for a run that goes on with "
        "the ranks that are there: --np 2:8, --np=-2:-8",
    )
    run_command.add_argument(
        "--master", metavar="URL", help="the Spark master, or a Spark Connect server (sc://...)"
    )
    run_command.add_argument(
        "--conf",
        action="append",
        default=[],
        type=run_options.pair,
        metavar="NAME=VALUE",
        help="a Spark setting, with --master; may be repeated",
    )
    run_command.add_argument("--function", metavar="NAME", help="call this function of the file")
    run_options.add(run_command)
    run_command.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    try:
        return run(options)
    except (UsageError, ValueError) as error:
        print(f"horovod-runner run: {error}", file=sys.stderr)
        return 2


def find_main(target: str, function: str | None) -> Callable[[], Any]:
    """The function to run: of ``train.py``, ``train.py:main`` or ``package.module:main``.

    Raises:
        UsageError: there is no such file, module or function, or the file is not Python.
    """
    where, colon, named = target.partition(":")
    if colon and function is not None:
        raise UsageError(f"{target} already names a function: leave out --function {function}")
    name = named if colon else function
    if where.endswith(".py"):
        path = Path(where).absolute()
        source = _text(path, where)
        _check(source, where, name)
        return Script(path, source, name)
    if not name:
        raise UsageError(
            f"{target} is not a .py file, and names no function: use train.py, train.py:main or "
            "package.module:main"
        )
    try:
        spec = util.find_spec(where)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{where} cannot be imported: {error}") from error
    if spec is None:
        raise UsageError(
            f"there is no module {where} in {os.getcwd()} or among the installed packages"
        )
    if spec.origin and spec.origin.endswith(".py"):
        _check(_text(Path(spec.origin), where), where, name)
    return Imported(where, name)


def _text(path: Path, where: str) -> str:
    """The text of a Python file, in the encoding that a mark or a line of it names."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from error


def _check(source: str, where: str, function: str | None) -> None:
    """Check that a file is Python and defines a function, without running it here."""
    try:
        tree = ast.parse(source, where)
    except SyntaxError as error:
        raise UsageError(
            f"{where}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from error
    if function is None:
        return
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if function not in names and "*" not in names:
        raise UsageError(f"{where} defines no {function}")


def run(options: argparse.Namespace) -> int:
    """Run the target of the command line; returns the exit status of the training.

    0 for success, the exit code of the first rank that failed, 128 plus the number of the signal
    that killed it, or 1 for an exception.

    Raises:
        UsageError: as :func:`find_main`; or the options contradict each other.
        HorovodRunnerError: the ranks could not be started, or were ended.
    """
    script = options.target.partition(":")[0]
    is_file = script.endswith(".py")
    # As Python itself does: the script's folder, or for a module the current one.
    sys.path.insert(0, str(Path(script).absolute().parent) if is_file else os.getcwd())
    main = find_main(options.target, options.function)
    sys.argv = [script, *options.arguments]
    np, started_by = _where(options.np, options.master)
    if not _is_above_0(np) and (options.master or options.conf):
        raise UsageError(
            f"--np {np} starts processes on this machine, and --master and --conf are for Spark: "
            "set --np above 0, or leave them out"
        )
    if options.conf and options.master is None:
        raise UsageError("--conf requires --master; without it the settings of spark-submit apply")
    if options.resume and options.checkpoint_dir is None:
        raise UsageError(
            "--resume requires --checkpoint-dir, the folder that the earlier run wrote to"
        )
    try:
        ship = [import_module(name) for name in options.ship_modules]
    except ImportError as error:
        raise UsageError(f"--ship-modules: {error}") from error
    with ExitStack() as stack:
        spark = None  # HorovodRunner finds one
        if options.master is not None:
            name = f"horovod-runner {Path(script).name}"
            spark = open_session(options.master, name, options.conf)
            stack.callback(spark.stop)
        stack.enter_context(sigterm_raises(Terminated()))
        given = {"np": np, "spark": spark, "launcher": started_by, "ship_modules": ship}
        runner = HorovodRunner(**grouped({**run_options.chosen(options), **given}))
        return _run(runner, main)


def _run(runner: HorovodRunner, main: Callable[[], Any]) -> int:
    try:
        value = runner.run(main)
    except Terminated:
        return TERMINATED
    except CancelledError as error:
        print(f"horovod-runner: {error}", file=sys.stderr)
        return TERMINATED
    except GpuError as error:
        print(f"horovod-runner: {error} On this command line: --cpu.", file=sys.stderr)
        return 1
    except Exception as error:
        failed = error if isinstance(error, RankFailedError) else error.__cause__
        if not isinstance(failed, RankFailedError):
            raise
        print(f"horovod-runner: {failed}", file=sys.stderr)
        code = failed.exit_code
        return 1 if code is None else 128 - code if code < 0 else code or 1
    if value is not None:
        print(value)
    return 0


def _where(
    np: int | tuple[int, int] | None, master: str | None
) -> tuple[int | tuple[int, int], StartedBy]:
    """The number of ranks, and what starts them."""
    in_slurm = "SLURM_JOB_ID" in os.environ and master is None
    if np is None:
        if in_slurm:
            return int(os.environ.get("SLURM_NTASKS") or 1), "slurm"
        if master is not None:
            raise UsageError("--master requires --np, the number of ranks")
        return -1, "spark"
    if np == 0:
        raise UsageError(
            "--np cannot be 0: above 0 ranks run on Spark or Slurm, below 0 on this machine"
        )
    return np, "slurm" if in_slurm and _is_above_0(np) else "spark"


def _is_above_0(np: int | tuple[int, int]) -> bool:
    return (np if isinstance(np, int) else np[0]) > 0


class Terminated(KeyboardInterrupt):
    """SIGTERM: from `kill`, or from a batch system that reclaims its machine."""
