"""The command line: ``horovod-runner install`` and ``horovod-runner doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from horovod_runner import __version__
from horovod_runner.errors import HorovodRunnerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for what is wrong, 2 for wrong usage."""
    options = parser().parse_args(arguments)
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
    install.add_argument("--mpi", action="store_true", help="the MPI controller beside Gloo")
    install.add_argument("--rebuild", action="store_true", help="do not use a wheel built before")
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


def _install(options: argparse.Namespace) -> int:
    from horovod_runner.install import install

    install(options.frameworks, gpu=options.gpu, mpi=options.mpi, rebuild=options.rebuild)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from horovod_runner import doctor

    return doctor.report(doctor.examine(options.master), as_json=options.json, say=print)


if __name__ == "__main__":
    sys.exit(main())
