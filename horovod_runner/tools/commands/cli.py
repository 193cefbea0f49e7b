"""The `horovod-runner` command: parses its arguments, and calls what they name."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from horovod_runner import __version__
from horovod_runner.common.arguments import did_you_mean, meant
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.sinks.streams import escape_unknown_characters
from horovod_runner.tools.commands import run, run_options, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for an error, 2 for wrong usage.

    The status of ``run`` is that of the training, see
    :func:`horovod_runner.tools.commands.run.run`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    escape_unknown_characters()
    # Arguments after the first "--" belong to the training, whatever they look like.
    split = given.index("--") if "--" in given else len(given)
    root, commands = parsers()
    options, strays = root.parse_known_args(given[:split])
    if strays:
        text = f"unknown arguments: {' '.join(strays)}."
        text += run_options.suggest_flags(strays, commands[options.name])
        if options.name == "run":
            text += (
                " Arguments of the training go after a -- at the end of the command: "
                f"-- {' '.join(strays)}"
            )
            print(f"horovod-runner run: {text}", file=sys.stderr)
            return 2
        root.error(text)
    options.arguments = given[split + 1 :]
    try:
        status: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended this process
    except HorovodRunnerError as error:
        print(f"horovod-runner: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # --al is not --all

    def error(self, message: str) -> NoReturn:
        """Exit; of a wrong choice, say which one was probably meant."""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w-]+", found[2])
            message += f".{did_you_mean(meant(found[1], choices))}"
        super().error(message)


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The argument parser, and those of the commands; a page of the docs is made from them."""
    root = _Parser(prog="horovod-runner", description="Horovod on Spark and on one machine.")
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(required=True, dest="name", metavar="COMMAND")
    _add_run(commands)
    _add_ps_and_stop(commands)
    _add_top(commands)
    _add_report(commands)
    _add_trace(commands)
    _add_install(commands)
    _add_doctor(commands)
    verify.add(commands)
    _add_migrate(commands)
    return root, commands.choices


def _add_install(commands: Any) -> None:
    install = commands.add_parser(
        "install",
        help="build and install Horovod for the frameworks of this environment",
        description="Install Horovod for the torch and TensorFlow of this Python environment, and "
        "check that two ranks reduce with it. A published wheel that fits is taken from --wheels "
        "or $HOROVOD_RUNNER_WHEELS, after a check of its SHA-256. Otherwise Horovod is built; the "
        "wheel is kept, and used again where all versions are the same.",
    )
    install.add_argument(
        "--frameworks",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="NAMES",
        help="torch, tensorflow, or both separated by a comma (default: all installed)",
    )
    plane = install.add_mutually_exclusive_group()
    plane.add_argument(
        "--gpu",
        action="store_true",
        default=None,
        help="NCCL on GPUs (default: where a framework is a CUDA build and nvcc and NCCL are here)",
    )
    plane.add_argument(
        "--cpu", action="store_false", dest="gpu", default=None, help="no GPU support"
    )
    install.add_argument(
        "--mpi",
        nargs="?",
        choices=("mpich", "system", "none"),
        const="system",
        help="build MPI support beside Gloo: with the mpich package, the system's MPI (the mpicxx "
        "on PATH; --mpi without a value), or none (default: the mpich package, if it is "
        "installed)",
    )
    install.add_argument("--rebuild", action="store_true", help="do not use an existing wheel")
    install.add_argument(
        "--wheels",
        metavar="DIR_OR_URL",
        help="a folder or URL (https://, s3://, ...) of published wheels, or one that hosts share: "
        "a wheel that one of them built for the same versions is installed from there, and a wheel "
        "that is built here is copied there for the others (default: $HOROVOD_RUNNER_WHEELS, for "
        "published wheels alone)",
    )
    install.set_defaults(command=_install)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check the environment, and say how to fix what does not work",
        description="Check everything that a run needs, and reduce a number over two ranks. The "
        "last lines say how to fix each problem; the exit status is 1 if there is one.",
    )
    doctor.add_argument(
        "--master", metavar="URL", help="also count the slots of this Spark master, and run there"
    )
    doctor.add_argument(
        "--path",
        metavar="URL",
        help="try this folder or URL instead, as checkpoint_dir and shared_dir: write, list, read, "
        "rename, delete; how fast, and what will not work there. With --master on an executor, too",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)


def _add_run(commands: Any) -> None:
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
    run_command.set_defaults(command=_run)


def _add_ps_and_stop(commands: Any) -> None:
    ps = commands.add_parser(
        "ps",
        help="list the runs of this machine",
        description="List the runs whose driver is on this machine, and worker processes here "
        "whose driver is elsewhere or gone.",
    )
    ps.add_argument("--json", action="store_true", help="print JSON")
    ps.set_defaults(command=_ps)
    stop = commands.add_parser(
        "stop",
        help="end a run and its worker processes",
        description="End runs. The driver ends all ranks, on all hosts, and raises "
        "CancelledError. If the driver is gone, all processes of the run on this machine are "
        "ended.",
    )
    which = stop.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "run", nargs="?", metavar="RUN", help="its id as ps shows it, or the start of the id"
    )
    which.add_argument("--all", action="store_true", help="all runs of this user on this machine")
    stop.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for a driver to end its ranks (default: %(default)g)",
    )
    stop.set_defaults(command=_stop)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write a page about a run: where its time went, metrics, hosts, logs, failures",
        description="Write one HTML file about a run of this user on this machine: its verdict, "
        "metrics, the time of its ranks, hosts, flame graphs, failures, checkpoints and logs. The "
        "file loads nothing from elsewhere. Only its owner can read it, because it shows what the "
        "run printed. A run that still goes on is shown as it is now.",
    )
    report.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="its id as ps or --list shows it, the start of the id, or the path of a record "
        "(default: the latest run)",
    )
    report.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file to write (default: the run's id and .html, in the current folder)",
    )
    report.add_argument(
        "--list", action="store_true", help="list the runs that have a record, the latest first"
    )
    report.set_defaults(command=_report)


def _add_top(commands: Any) -> None:
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


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser(
        "trace",
        help="write one trace of a run for Perfetto or Chrome",
        description="Write one trace of an ended run of this user: a process for each rank and "
        "each host, on one clock, with what --timeline and --torch-profiler have recorded. Open it "
        "at https://ui.perfetto.dev.",
    )
    trace.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="the run's id, the start of it, or the file of its record (default: the latest run)",
    )
    trace.add_argument(
        "-o",
        "--output",
        default="trace.json.gz",
        metavar="FILE",
        help="the file to write, compressed if its name ends in .gz (default: %(default)s)",
    )
    trace.set_defaults(command=_trace)


def _add_migrate(commands: Any) -> None:
    migrate = commands.add_parser(
        "migrate",
        help="change code that was written for sparkdl, horovod.spark, Keras 2 and others",
        description="Show what has changed since a script or notebook was written, as a diff and "
        "with a reason for each change, and what has to be changed by hand. Nothing is run. Needs "
        "libcst: pip install 'horovod_runner[migrate]'.",
    )
    migrate.add_argument("files", nargs="+", metavar="FILE", help="a .py file or .ipynb notebook")
    migrate.add_argument("--write", action="store_true", help="write the changes to the files")
    migrate.set_defaults(command=_migrate)


def _run(options: argparse.Namespace) -> int:
    try:
        return run.run(options, options.arguments)
    except (run.UsageError, ValueError) as error:
        print(f"horovod-runner run: {error}", file=sys.stderr)
        return 2


def _ps(options: argparse.Namespace) -> int:
    from horovod_runner.results import registry

    runs = registry.find()
    print(registry.as_json(runs) if options.json else registry.table(runs))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from horovod_runner.results import registry

    runs = registry.find()
    if options.all and not runs:
        print("no runs")
    status = 0
    for listed in runs if options.all else [registry.find_one(runs, options.run)]:
        problem = registry.stop(listed, options.timeout)
        print(f"{listed.run_id}: {problem or 'ended'}", file=sys.stderr if problem else sys.stdout)
        status = status or bool(problem)
    return int(status)


def _report(options: argparse.Namespace) -> int:
    from horovod_runner.tools.commands import report

    if options.list:
        print(report.listing())
        return 0
    return report.report(options.run, options.output)


def _top(options: argparse.Namespace) -> int:
    from horovod_runner.tools.commands import top

    return top.top(options.run, once=options.once, as_json=options.json)


def _trace(options: argparse.Namespace) -> int:
    from horovod_runner.results.saved_run import load_run

    run = load_run(options.run)
    try:
        missing = run.trace(options.output)
    except OSError as error:
        print(f"horovod-runner: the trace cannot be written: {error}", file=sys.stderr)
        return 1
    for sentence in missing:
        print(f"horovod-runner: {sentence}", file=sys.stderr)
    print(f"run {run.run_id} ({run.main}): {options.output}")
    return 0


def _install(options: argparse.Namespace) -> int:
    from horovod_runner.tools.commands.install import install

    chosen = {"gpu": options.gpu, "mpi": options.mpi, "rebuild": options.rebuild}
    install(options.frameworks, **chosen, shared=options.wheels)
    return 0


def _migrate(options: argparse.Namespace) -> int:
    from horovod_runner.tools.commands.migrate import migrate

    migrate(options.files, write=options.write, say=print)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from horovod_runner.tools.commands import doctor

    if options.path is not None:
        findings, verdict = doctor.examine_folder(options.path, options.master), "Runs can use it."
    else:
        findings, verdict = doctor.examine(options.master), "Everything works."
    return doctor.report(findings, as_json=options.json, say=print, verdict=verdict)


if __name__ == "__main__":
    sys.exit(main())
