"""Runs checks one after another, each in a child process with a time limit of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from horovod_runner.tools.verify import child
from horovod_runner.tools.verify.check import VerifyCase, VerifyCheck, VerifyReading, missing
from horovod_runner.tools.verify.machine import ThisMachine

Status = Literal["passed", "failed", "skipped"]

_OUTPUT_LINES: Final = 40
_PATIENCE: Final = 20.0  # seconds for a check that was interrupted: it ends its ranks within ten


class CheckResult(msgspec.Struct, frozen=True):
    """How a check went."""

    name: str
    claim: str
    page: str
    status: Status  # "failed": a reading is not as expected, or it did not get to its end
    readings: tuple[VerifyReading, ...] = ()
    reason: str = ""  # why it was skipped, or did not get to its end
    seconds: float = 0.0
    output: str = ""  # the end of what it and its ranks printed, if it failed; and a traceback


def ends(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a check, and say whether it has ended within a number of seconds."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit)
    return process.poll() is not None


def run(
    checks: Sequence[VerifyCheck],
    machine: ThisMachine,
    *,
    quick: bool,
    variables: Mapping[str, str],
    begin: Callable[[VerifyCheck], None],
    wait: Callable[[subprocess.Popen[bytes], float], bool] = ends,
    patience: float = _PATIENCE,
) -> Iterator[CheckResult]:
    """Run checks in their order, and yield how each went; ``begin`` is called before each."""
    for check in checks:
        reason = missing(check.needs, machine)
        if reason:
            yield CheckResult(check.name, check.claim, check.page, "skipped", reason=reason)
            continue
        begin(check)
        with tempfile.TemporaryDirectory(
            prefix="horovod_runner-verify-", ignore_cleanup_errors=True
        ) as folder:
            yield _run(check, VerifyCase(machine, quick, folder), variables, wait, patience)


def _run(
    check: VerifyCheck,
    case: VerifyCase,
    variables: Mapping[str, str],
    wait: Callable[[subprocess.Popen[bytes], float], bool],
    patience: float,
) -> CheckResult:
    folder = Path(case.folder)
    given, readings, log = folder / "case.json", folder / "readings", folder / "output"
    given.write_bytes(msgspec.json.encode(case))
    function = [check.function.__module__, check.function.__name__]
    command = [sys.executable, "-m", child.__name__, *function, str(given), str(readings)]
    # Its runs are not the user's: their records go away with the folder.
    environment = {**os.environ, **variables, "XDG_STATE_HOME": str(folder / "state")}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # which the child's end reads, to notice the end of this process
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            late = not wait(process, check.limit)
        finally:
            _end(process, patience)
    seconds = time.monotonic() - start
    found, trouble = child.read(readings)
    printed = log.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]
    if trouble is not None:
        printed += ["", *trouble.details.splitlines()]
    reason = ended_badly(process.returncode, trouble, check.limit if late else None)
    failed = bool(reason) or not found or any(reading.ok is False for reading in found)
    return CheckResult(
        name=check.name,
        claim=check.claim,
        page=check.page,
        status="failed" if failed else "passed",
        readings=tuple(found),
        reason=reason,
        seconds=seconds,
        output="\n".join(printed) if failed else "",
    )


def ended_badly(code: int, trouble: child.Trouble | None, limit: float | None) -> str:
    """Why a check did not get to its end, or was not let past its limit; empty if it did."""
    if limit is not None:
        return f"it was ended because it took longer than {limit:g} s"
    if trouble is not None:
        return trouble.text
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"its process ended with exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """End a check that still runs, with its ranks."""
    if process.stdin is not None:
        process.stdin.close()  # the child interrupts itself
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
    process.wait()
