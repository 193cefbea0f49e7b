"""What is told of a checkpoint: its marker, its file's name, and which ones retention lets go.

    checkpoint-000007-step-1200-1a2b3c4d.pt      the state
    checkpoint-000007-step-1200-1a2b3c4d.json    its marker, written last: without it there is none

The number counts the checkpoints of a folder, so the latest one is known without asking any clock;
the last part is the run's id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

Mode = Literal["min", "max"]
Kind = Literal["torch", "arrays", "keras", "bytes", "folder"]
SUFFIXES: Final[Mapping[Kind, str]] = {
    "torch": ".pt",
    "arrays": ".npz",
    "keras": ".keras",
    "bytes": ".bin",
    "folder": ".tar",
}
_NAME = re.compile(
    r"checkpoint-(?P<number>[0-9]{6,12})-step-(?P<step>-?[0-9]{1,19})-[0-9a-z]{1,32}"
    r"\.(?:pt|npz|keras|bin|tar)"
)


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is told of a checkpoint.

    Attributes:
        name: of the file with the state.
        number: the how manieth of its folder, from 1 on.
        step: as given to ``save_checkpoint``.
        kind: how the state is stored, see :mod:`horovod_runner.states`.
        size: of the file, in bytes.
        sha256: of the file, in hexadecimal.
        run_id: the run that wrote it.
        attempt: of that run, from 1 on.
        saved_at: seconds since the epoch, by the clock of the host that wrote it.
        metrics: as given to ``save_checkpoint``.
    """

    name: str
    number: int
    step: int
    kind: Kind
    size: int
    sha256: str
    run_id: str
    attempt: int = 1
    saved_at: float = 0.0
    metrics: dict[str, int | float] = {}


def file_name(number: int, step: int, run_id: str, kind: Kind) -> str:
    """A checkpoint's file name."""
    return f"checkpoint-{number:06}-step-{step}-{run_id}{SUFFIXES[kind]}"


def is_name(name: str) -> bool:
    """Whether a text is the name of a checkpoint's file, and so of a file in its folder."""
    return _NAME.fullmatch(name) is not None


def marker_name(name: str) -> str:
    """The name of a checkpoint's marker."""
    return f"{name.rpartition('.')[0]}.json"


def surplus(
    markers: Iterable[Marker], keep: int | None, best: str | None, mode: Mode
) -> list[Marker]:
    """The checkpoints that retention lets go: all but the ``keep`` best, and the latest.

    Args:
        markers: all there are.
        keep: how many to keep; None keeps all.
        best: the metric by which they are ranked; None: by age.
        mode: whether a small or a large value of it is good.
    """
    newest = sorted(markers, key=lambda marker: marker.number, reverse=True)
    if keep is None:
        return []
    if best is None:
        return newest[keep:]
    kept = {marker.name for marker in [*newest[:1], *ranked(newest, best, mode)[:keep]]}
    return [marker for marker in newest if marker.name not in kept]


def ranked(markers: Sequence[Marker], best: str, mode: Mode) -> list[Marker]:
    """Checkpoints by a metric, the best first; of equal ones the newest.

    Those that lack the metric, or where it is NaN, come last.
    """

    def key(marker: Marker) -> tuple[bool, float, int]:
        value = float(marker.metrics.get(best, math.nan))
        if math.isnan(value):
            return True, 0.0, -marker.number
        return False, value if mode == "min" else -value, -marker.number

    return sorted(markers, key=key)
