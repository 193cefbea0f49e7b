"""The process of one check: calls its function, and writes each reading as it comes.

    python -m horovod_runner.tools.verify.child MODULE CHECK CASE READINGS

A check that crashes or hangs takes only this process with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec

from horovod_runner.tools.verify.check import VerifyReading, decode_case


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """An exception that ended a check, and its traceback."""

    text: str
    details: str


_decode_line: Final = msgspec.json.Decoder[VerifyReading | Trouble](VerifyReading | Trouble).decode


def main(module: str, name: str, case: Path, readings: Path) -> int:
    """Run a check, and write its readings, one JSON object a line; returns the exit status."""
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    given = decode_case(case.read_bytes())
    with readings.open("wb", buffering=0) as file:
        try:
            for reading in getattr(import_module(module), name).function(given):
                file.write(msgspec.json.encode(reading) + b"\n")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            file.write(msgspec.json.encode(Trouble(text, traceback.format_exc())) + b"\n")
            return 1
    return 0


def _end_with_parent() -> None:
    """Interrupt the check when the parent closes the pipe to this process, or is gone."""
    os.read(sys.stdin.fileno(), 1)  # not by a buffered reader, whose lock would be held at the exit
    os.kill(os.getpid(), signal.SIGINT)


def read(readings: Path) -> tuple[list[VerifyReading], Trouble | None]:
    """Read the file of a check: its readings, and the exception that ended it, if one did."""
    found: list[VerifyReading] = []
    trouble = None
    for line in readings.read_bytes().splitlines() if readings.exists() else []:
        try:
            each = _decode_line(line)
        except msgspec.DecodeError:  # the process was killed in the middle of a line
            break
        if isinstance(each, VerifyReading):
            found.append(each)
        else:
            trouble = each
    return found, trouble


if __name__ == "__main__":
    _, _module, _name, _case, _readings = sys.argv
    sys.exit(main(_module, _name, Path(_case), Path(_readings)))
