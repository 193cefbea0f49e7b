"""Reads patch files (unified diffs) and applies them strictly: exact lines, at the exact place.

The ``patch`` program is not on every machine, and it accepts hunks that have moved or that fit
roughly. The patched release is pinned by its digest, so every hunk must match at its line.
A patch changes existing files only. New files belong in the overlay folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from horovod_runner.errors import InstallError

_FIRST_FILE = re.compile(r"^--- ", re.MULTILINE)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ADVICE = (
    "Either the source is not the release that the patches fit, or patches are missing: reinstall "
    "horovod_runner."
)


@dataclass(frozen=True)
class Patch:
    """One patch file: the text before its first ``---`` line, for people, and the diff."""

    name: str
    header: str
    diff: str


@dataclass(frozen=True)
class Hunk:
    """One changed place: lines of a file from the 1-based ``start`` on, before and after."""

    path: str
    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def read_patches(folder: Path) -> list[Patch]:
    """Read the patch files of a folder in the order of their names."""
    patches = []
    for file in sorted(folder.glob("*.patch")):
        text = file.read_bytes().decode()
        first = _FIRST_FILE.search(text)
        at = first.start() if first else len(text)
        patches.append(Patch(file.name, text[:at], text[at:]))
    if not patches:
        raise InstallError(
            f"{folder} has no patches for Horovod. The installed horovod_runner is incomplete: "
            "reinstall it."
        )
    return patches


def hunks(patch: Patch) -> list[Hunk]:
    """Parse the hunks of a patch, in its order."""
    parsed: list[Hunk] = []
    lines = patch.diff.removesuffix("\n").split("\n")
    path, at = "", 0
    while at < len(lines):
        match = _HUNK.match(lines[at])
        if lines[at].startswith("--- a/") and lines[at + 1 :][:1] == [f"+++ b/{lines[at][6:]}"]:
            path = lines[at][6:]
            at += 2
        elif match and path:
            start, before, after = (int(number or 1) for number in match.groups())
            old: list[str] = []
            new: list[str] = []
            at += 1
            while (len(old) < before or len(new) < after) and at < len(lines):
                kind, text = lines[at][:1], lines[at][1:]
                if kind not in {" ", "-", "+"}:
                    break
                if kind != "+":
                    old.append(text)
                if kind != "-":
                    new.append(text)
                at += 1
            # Without an old line nothing would show that the place is right.
            if not old or (len(old), len(new)) != (before, after):
                raise _malformed(patch, at)
            parsed.append(Hunk(path, start, tuple(old), tuple(new)))
        else:
            raise _malformed(patch, at)
    return parsed


def apply(patch: Patch, root: Path) -> None:
    """Apply a patch to the files below ``root``.

    If it fails, hunks of other files may have been applied.
    """
    by_file: dict[str, list[Hunk]] = {}
    for hunk in hunks(patch):
        by_file.setdefault(hunk.path, []).append(hunk)
    for path, file_hunks in by_file.items():
        file = root / path
        if not file.is_file():
            raise InstallError(f"{patch.name} changes {path}, which does not exist. {_ADVICE}")
        lines = file.read_bytes().decode().split("\n")
        patched: list[str] = []
        done = 0  # lines of the file before this one are in `patched`
        for number, hunk in enumerate(file_hunks, 1):
            first, end = hunk.start - 1, hunk.start - 1 + len(hunk.old)
            if first < done or tuple(lines[first:end]) != hunk.old:
                raise InstallError(
                    f"{patch.name} does not apply: hunk {number} of {path} does not match line "
                    f"{hunk.start} and the lines after it. {_ADVICE}"
                )
            patched += [*lines[done:first], *hunk.new]
            done = end
        file.write_bytes("\n".join([*patched, *lines[done:]]).encode())


def _malformed(patch: Patch, at: int) -> InstallError:
    number = patch.header.count("\n") + at + 1
    return InstallError(
        f"{patch.name} is damaged: its line {number} is not what a unified diff has there. "
        "Reinstall horovod_runner."
    )
