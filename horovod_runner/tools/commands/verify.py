"""`horovod-runner verify`: runs the claims of docs/howto/gpu.md as checks on this machine."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_runner.errors import HorovodRunnerError
from horovod_runner.tools.horovod_build import toolchain

if TYPE_CHECKING:
    from horovod_runner.tools.verify.check import VerifyCheck
    from horovod_runner.tools.verify.report import VerifyReport


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    verify = commands.add_parser(
        "verify",
        help="check all that the docs say about GPUs on this machine, and write a report",
        description="Run the claims of docs/howto/gpu.md as checks on this machine's GPUs: the "
        "build, which GPU a rank gets, reductions, speeds, the data feed, Keras, FSDP2, failures "
        "and measurements. It takes up to ten minutes. Each check runs in processes of its own and "
        "has a time limit. What a machine lacks is skipped, and the report says why. The exit "
        "status is 1 if a check failed.",
    )
    verify.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="use the first N GPUs that this process may use; 0 for none (default: all)",
    )
    verify.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="also write the report as one HTML file that loads nothing from elsewhere. Only its "
        "owner can read it",
    )
    verify.add_argument(
        "--only",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="NAMES",
        help="run only these checks, separated by commas",
    )
    verify.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, for a first look within two minutes: speeds are shown, and not judged",
    )
    verify.add_argument("--list", action="store_true", help="list the checks, and run none")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    from horovod_runner.tools.verify import registry

    checks = [registry.find(name) for name in options.only] if options.only else registry.CHECKS
    if options.list:
        for check in checks:
            print(f"{check.name:<17} {check.claim} (docs/{check.page})")
        return 0
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        parent = Path(options.output).absolute().parent
        raise HorovodRunnerError(f"-o {options.output}: there is no folder {parent}")
    return _verify(checks, options)


def _verify(checks: Sequence[VerifyCheck], options: argparse.Namespace) -> int:
    """Run checks, show their results as they come, and return the exit status.

    It is 1 if a check failed, or if the file cannot be written.
    """
    from horovod_runner.tools.verify import machine, report, session

    began, start = time.time(), time.monotonic()
    visible = machine.visible()
    used = machine.first(visible, options.gpus)
    # A check that names no framework is about all of them.
    named = [check.needs.frameworks or toolchain.FRAMEWORKS for check in checks]
    found = machine.look(used, sorted({name for names in named for name in names}))
    variables = machine.environment(used, visible)
    results: list[session.CheckResult] = []
    width = shutil.get_terminal_size().columns

    def say(text: str, end: str = "\n") -> None:
        if not options.json:
            print(text, end=end, flush=True)

    def begin(check: VerifyCheck) -> None:
        if sys.stdout.isatty():  # the result's line is longer, and goes over it
            say(f"running  {check.name} ...", end="\r")

    say(f"{report.machine_text(found)}\n")
    try:
        ran = session.run(checks, found, quick=options.quick, variables=variables, begin=begin)
        for result in ran:
            results.append(result)
            say("\n".join(report.lines(result, width)))
    finally:  # also after Ctrl-C: minutes of results are worth a file
        seconds = time.monotonic() - start
        whole = report.VerifyReport(found, tuple(results), began, seconds, options.quick)
        written = options.output is None or _write(whole, Path(options.output))
    if options.json:
        print(report.as_json(whole))
    say(f"\n{report.summary(whole)}")
    if written and options.output is not None:
        say(options.output)
    return int(whole.failed or not written)


def _write(whole: VerifyReport, path: Path) -> bool:
    from horovod_runner.tools.verify import report

    try:
        report.write_page(whole, path)
    except OSError as error:
        print(
            f"horovod-runner: the report cannot be written: {error}. Name a file in a folder that "
            "you can write to: -o FILE",
            file=sys.stderr,
        )
        return False
    return True
