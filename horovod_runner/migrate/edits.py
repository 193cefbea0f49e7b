"""Changes to a text, and the lines of the text before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """Replaces a part of a text.

    Attributes:
        start: the first character.
        end: the character behind the last; ``start`` for an insertion.
        new: what to write there.
    """

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Finding:
    """A place in old code.

    Attributes:
        line: its line, from 1 on.
        why: what is wrong with it, and what to write.
        edits: the changes that mend it; empty if it has to be changed by hand.
    """

    line: int
    why: str
    edits: tuple[Edit, ...] = ()


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with the edits, which do not overlap."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def without_overlaps(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings whose edits overlap no edit of an earlier one, and do not repeat it."""
    taken: list[Edit] = []
    chosen = []
    for finding in findings:
        if finding.edits and not any(_overlap(a, b) for a in finding.edits for b in taken):
            taken += finding.edits
            chosen.append(finding)
    return chosen


def _overlap(a: Edit, b: Edit) -> bool:
    if a.start == a.end and b.start == b.end:
        return a.start == b.start
    return a.start < b.end and b.start < a.end


def lines_before(text: str, edits: Sequence[Edit], lines: Sequence[int]) -> list[int]:
    """Return, for each line of the text with the edits, the line of the text before.

    Args:
        text: the text before the edits.
        edits: do not overlap.
        lines: the line in an earlier text for each line of ``text``.

    Returns:
        The lines in that earlier text.
    """
    result: list[int] = []
    position, number = 0, 0  # in the text before; the index of its line
    for edit in sorted(edits):
        kept = text.count("\n", position, edit.start)
        result += lines[number : number + kept]
        number += kept
        result += [lines[number]] * edit.new.count("\n")
        number += text.count("\n", edit.start, edit.end)
        position = edit.end
    return result + list(lines[number:])
