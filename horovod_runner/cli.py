"""The command line: ``horovod-runner`` run, ps, stop, install and doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, get_args

from horovod_runner import __version__, submit
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.hang import DEFAULT_SECONDS
from horovod_runner.messages import ControllerChoice
from horovod_runner.runner import Verbosity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for what is wrong, 2 for wrong usage.

    That of ``run`` is the training's, see :func:`horovod_runner.submit.run`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # What is behind the first "--" is the training's own, whatever it looks like.
    split = given.index("--") if "--" in given else len(given)
    root = parser()
    options, strays = root.parse_known_args(given[:split])
    if strays and options.command is _run:
        print(
            f"horovod-runner run: unknown: {' '.join(strays)}. What is the training's own goes "
            f"behind a -- at the end of the command: -- {' '.join(strays)}",
            file=sys.stderr,
        )
        return 2
    if strays:
        root.error(f"unrecognized arguments: {' '.join(strays)}")
    options.arguments = given[split + 1 :]
    try:
        status: int = options.command(options)
    except HorovodRunnerError as error:
        print(f"horovod-runner: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def parser() -> argparse.ArgumentParser:
    """The argument parser, from which the help in the docs is made as well."""
    root = argparse.ArgumentParser(
        prog="horovod-runner", description="Horovod on Spark and on one machine."
    )
    root.add_argument("--version", action="version", version=__version__)
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_ps_and_stop(commands)

    install = commands.add_parser(
        "install",
        help="build and install Horovod for the frameworks of this environment",
        description="Build Horovod against the torch and TensorFlow of this Python environment, "
        "install it, and prove that two ranks reduce with it. The wheel is kept and used again "
        "wherever all versions are the same.",
    )
    install.add_argument(
        "--frameworks",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="NAMES",
        help="torch, tensorflow, or both with a comma between them (default: all installed)",
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
        help="the MPI controller beside Gloo: of the mpich package, of the system's MPI (the "
        "mpicxx on PATH; also without a word), or none; without --mpi, the mpich package's if that "
        "is installed",
    )
    install.add_argument("--rebuild", action="store_true", help="do not use a wheel built before")
    install.add_argument(
        "--wheels",
        metavar="DIR_OR_URL",
        help="a folder or URL (https://, s3://, ...) that hosts share: a wheel that one of them "
        "built for the same versions is installed from there, its SHA-256 checked; what is built "
        "here is copied there for the others",
    )
    install.set_defaults(command=_install)

    doctor = commands.add_parser(
        "doctor",
        help="say what is here, whether it works, and what to do about what does not",
        description="Look at everything that a run needs, reduce a number over two ranks, and end "
        "with what to do about each thing that is wrong (exit status 1 if something is).",
    )
    doctor.add_argument(
        "--master", metavar="URL", help="also count this Spark master's slots and run there"
    )
    doctor.add_argument("--json", action="store_true", help="for machines")
    doctor.set_defaults(command=_doctor)
    return root


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a script, or a function, as ranks",
        usage="%(prog)s [options] TARGET [-- ARGUMENT...]",
        description="Run a Python file, or a function of a file or module, on every rank. What is "
        "behind the -- is in its sys.argv; a function is called without arguments, and what it "
        "returns on rank 0 is printed. The exit status is the training's: 0, the exit code of the "
        "first rank that failed, or 128 and the number of the signal that killed it; 130 after "
        "Ctrl-C, 143 after SIGTERM and `horovod-runner stop`, which end the ranks without further "
        "ado.",
        epilog="Ranks above 0 are started in the Slurm allocation that this command is in, or else "
        "on Spark; below 0 as processes of this machine.",
    )
    run.add_argument(
        "target",
        metavar="TARGET",
        help="train.py, which runs as with python; train.py:main or package.module:main",
    )
    run.add_argument(
        "--np",
        type=int,
        metavar="N",
        help="ranks: above 0 on Spark or Slurm, below 0 on this machine (default: all tasks of the "
        "Slurm allocation, else -1)",
    )
    run.add_argument("--master", metavar="URL", help="the Spark master, or an sc:// server")
    run.add_argument(
        "--conf",
        action="append",
        default=[],
        type=submit.pair,
        metavar="NAME=VALUE",
        help="a setting of Spark, with --master; may be repeated",
    )
    run.add_argument("--function", metavar="NAME", help="call this function of the file")
    device = run.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        action="store_const",
        dest="gpus_per_rank",
        const=1.0,
        help="a GPU for each rank, and an error where there are too few (default: where they are)",
    )
    device.add_argument(
        "--cpu", action="store_const", dest="gpus_per_rank", const=0.0, help="no GPUs"
    )
    run.add_argument(
        "--controller",
        choices=get_args(ControllerChoice),
        default="auto",
        help="what the ranks negotiate and, on CPUs, reduce with (default: auto, the faster one)",
    )
    run.add_argument(
        "--checkpoint-dir", metavar="D", help="where save_checkpoint writes: path, URL"
    )
    run.add_argument(
        "--resume", action="store_true", help="go on from the latest checkpoint that is there"
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="launch again so often, from the latest checkpoint (default: 0)",
    )
    run.add_argument(
        "--env",
        action="append",
        default=[],
        type=submit.pair,
        metavar="NAME=VALUE",
        help="a variable for the ranks; may be repeated",
    )
    run.add_argument(
        "--driver-log-verbosity",
        choices=get_args(Verbosity),
        default="all",
        help="what of the ranks' output is shown (default: all)",
    )
    run.add_argument(
        "--slot-timeout", type=float, metavar="S", help="seconds to wait for slots of the cluster"
    )
    run.add_argument(
        "--hang-timeout",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="S",
        help="seconds without progress that end the run (default: %(default)g; 0: none)",
    )
    run.add_argument(
        "--ship-modules",
        type=lambda text: [name.strip() for name in text.split(",")],
        default=[],
        metavar="NAMES",
        help="modules of your own that the executors lack, with commas between them",
    )
    run.set_defaults(command=_run)


def _add_ps_and_stop(commands: Any) -> None:
    ps = commands.add_parser(
        "ps",
        help="list the runs of this machine",
        description="List the runs whose driver is on this machine, and workers here whose driver "
        "is elsewhere or gone.",
    )
    ps.add_argument("--json", action="store_true", help="for machines")
    ps.set_defaults(command=_ps)
    stop = commands.add_parser(
        "stop",
        help="end a run and its workers",
        description="End runs: their drivers end all ranks, wherever those are, and raise "
        "CancelledError. Of a run whose driver has gone, all processes on this machine are ended.",
    )
    which = stop.add_mutually_exclusive_group(required=True)
    which.add_argument("run", nargs="?", metavar="RUN", help="its id, as ps shows it, or the start")
    which.add_argument("--all", action="store_true", help="all runs of this user here")
    stop.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for a driver to end its ranks (default: %(default)g)",
    )
    stop.set_defaults(command=_stop)


def _run(options: argparse.Namespace) -> int:
    try:
        return submit.run(options, options.arguments)
    except (submit.UsageError, ValueError) as error:
        print(f"horovod-runner run: {error}", file=sys.stderr)
        return 2


def _ps(options: argparse.Namespace) -> int:
    from horovod_runner import runs

    found = runs.find()
    if options.json:
        print(runs.as_json(found))
    elif found:
        print(runs.table(found))
    else:
        print("no runs")
    return 0


def _stop(options: argparse.Namespace) -> int:
    from horovod_runner import runs

    found = runs.find()
    chosen = [each for each in found if options.all or each.run_id.startswith(options.run)]
    if not chosen:
        if options.all:
            print("no runs")
            return 0
        there = ", ".join(each.run_id for each in found) or "none"
        print(f"horovod-runner: no run {options.run} here; there are: {there}", file=sys.stderr)
        return 1
    if len(chosen) > 1 and not options.all:
        several = ", ".join(each.run_id for each in chosen)
        print(f"horovod-runner: {options.run} may be {several}", file=sys.stderr)
        return 1
    status = 0
    for each in chosen:
        problem = runs.stop(each, options.timeout)
        print(f"{each.run_id}: {problem or 'ended'}", file=sys.stderr if problem else sys.stdout)
        status = status or bool(problem)
    return int(status)


def _install(options: argparse.Namespace) -> int:
    from horovod_runner.install import install

    install(
        options.frameworks,
        gpu=options.gpu,
        mpi=options.mpi,
        rebuild=options.rebuild,
        shared=options.wheels,
    )
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from horovod_runner import doctor

    return doctor.report(doctor.examine(options.master), as_json=options.json, say=print)


if __name__ == "__main__":
    sys.exit(main())
