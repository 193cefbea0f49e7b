"""The metadata of a checkpoint (its marker), and the names of its two files.

    checkpoint-000007-step-1200-1a2b3c4d.pt      the state
    checkpoint-000007-step-1200-1a2b3c4d.json    the marker, written last: only with it the
                                                 checkpoint is complete

A sharded checkpoint is a folder, with a file of each rank:

    checkpoint-000007-step-1200-1a2b3c4d.dcp/    .metadata, __0_1.distcp, __1_1.distcp

The first number counts the checkpoints of a folder, so the latest one is known without comparing
clocks. The last part is the run's id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

Kind = Literal["torch", "arrays", "keras", "bytes", "folder", "sharded"]
SUFFIXES: Final[Mapping[Kind, str]] = {
    "torch": ".pt",
    "arrays": ".npz",
    "keras": ".keras",
    "bytes": ".bin",
    "folder": ".tar",
    "sharded": ".dcp",
}
#: The file in the folder of a sharded checkpoint that describes the others.
METADATA: Final = ".metadata"
_NAME = re.compile(
    r"checkpoint-(?P<number>[0-9]{6,12})-step-(?P<step>-?[0-9]{1,19})-[0-9a-z]{1,32}"
    r"\.(?:pt|npz|keras|bin|tar|dcp)"
)


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a checkpoint.

    Attributes:
        name: of the file with the state, or of the folder of a sharded one.
        number: 1-based sequence number within the folder.
        step: as given to ``save_checkpoint``.
        kind: the file's format, see :mod:`horovod_runner.checkpoints.formats`.
        size: of the file, in bytes; of all files of a sharded one.
        sha256: of the file, in hexadecimal; of a sharded one, of its metadata.
        saved_at: seconds since the Unix epoch, by the clock of the host that wrote it.
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


decode_marker: Final = msgspec.json.Decoder(Marker).decode


def file_name(number: int, step: int, run_id: str, kind: Kind) -> str:
    """A checkpoint's file name."""
    return f"checkpoint-{number:06}-step-{step}-{run_id}{SUFFIXES[kind]}"


def is_name(name: str) -> bool:
    """Whether ``name`` is a checkpoint's file name; such a name cannot lead out of a folder."""
    return _NAME.fullmatch(name) is not None


def marker_name(name: str) -> str:
    """The file name of a checkpoint's marker."""
    return f"{name.rpartition('.')[0]}.json"
