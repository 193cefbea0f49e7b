"""Draws the lines at which a rank was seen as a flame graph: an SVG that needs no server.

A box is a call. Its width is the share of looks at which the main thread was in it, and what it
called is above it. A box tells its share and its line when the pointer is over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import PurePath
from typing import Final

from horovod_runner.common.stacks import is_library

_WIDTH: Final = 1200
_ROW: Final = 18
_LETTER: Final = 6.7  # the width of a character, in pixels
_LEAST: Final = 0.3  # pixels; narrower boxes are left out
_HUES: Final = {"user": (15, 60), "library": (190, 220)}  # degrees


@dataclass
class _Box:
    """A call with what it called."""

    share: float = 0.0
    calls: dict[str, _Box] = field(default_factory=dict)


def flame_graph(
    stacks: Iterable[tuple[Sequence[str], float]], title: str, least: float = _LEAST
) -> str:
    """Draw stacks as an SVG: calls, the outermost first, and the share of looks at each stack.

    Calls that are narrower than ``least``, in pixels of 1200, are left out.
    """
    root = _Box()
    for stack, share in stacks:
        root.share += share
        box = root
        for call in stack:
            box = box.calls.setdefault(call, _Box())
            box.share += share
    scale = _WIDTH / root.share if root.share else 0.0
    boxes = list(_boxes(root, 0.0, 1, scale, least))
    height = (max((depth for depth, _ in boxes), default=0) + 1) * _ROW + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -{height} {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" font-family="monospace" font-size="11">',
            f'<text x="4" y="{_ROW - 5 - height}">{escape(title)}</text>',
            *(svg for _, svg in boxes),
            "</svg>",
        ]
    )


def _boxes(
    parent: _Box, x: float, depth: int, scale: float, least: float
) -> Iterator[tuple[int, str]]:
    """Draw what a call has called, upwards from y = 0: how deep each box is, and its SVG."""
    for call, box in sorted(parent.calls.items(), key=lambda item: -item[1].share):
        width = box.share * scale
        if width < least:
            return
        place, _, function = call.rpartition(" ")
        label, room = f"{function} {PurePath(place).name}", int(width / _LETTER) - 1
        text = label if len(label) <= room else f"{label[: room - 1]}…" if room > 3 else ""
        yield (
            depth,
            f'<g><title>{escape(call)}: {box.share:.1%}</title><rect x="{x:.1f}" '
            f'y="{-depth * _ROW}" width="{width:.1f}" height="{_ROW - 1}" rx="2" '
            f'fill="{_colour(call)}"/><text x="{x + 3:.1f}" y="{-depth * _ROW + 12}">'
            f"{escape(text)}</text></g>",
        )
        yield from _boxes(box, x, depth + 1, scale, least)
        x += width


def _colour(call: str) -> str:
    """Warm colours for the user's files, cold ones for libraries; the same for the same call."""
    kind = "library" if is_library(call) else "user"
    low, high = _HUES[kind]
    digest = hashlib.blake2b(call.encode(errors="replace"), digest_size=2).digest()
    return f"hsl({low + int.from_bytes(digest) % (high - low)}, 75%, 70%)"
