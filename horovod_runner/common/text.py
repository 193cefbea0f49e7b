"""Rank numbers, sizes and tables as text for people, without secrets."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Final

MAX_LINES: Final = 16  # a table with more ranks or hosts than this is shortened
_LEAST_COLUMNS: Final = 40  # a narrower terminal breaks lines itself
_MAX_NAMES: Final = 4
_MAX_SPANS: Final = 10
HIDDEN: Final = "***"  # in place of a secret
_SECRET: Final = re.compile(
    r"passw|passphrase|pwd|secret|credential|token(?!i[sz])|(?<![a-z])auth(?!or)|key", re.IGNORECASE
)
# Counts: "max_tokens" is not a secret.
_COUNT: Final = re.compile(r"tokens|keys", re.IGNORECASE)
# The user and password of a URL. A password may contain "/" or "@". A port is not a password, and
# abfss://container@account names no user.
_USER_OF_URL: Final = re.compile(
    r"(?<=://)(?<!abfs://)(?<!abfss://)(?<!wasb://)(?<!wasbs://)"
    r"""(?:[^/?#\s'"]+|[^/:@\s]*:(?!\d+(?:[,/?#]|$))[^\s'"]*)(?=@)"""
)
_OPTION_OF_URL: Final = re.compile(r"""(?<=[?&;])([^=&;?\s'"]+)=([^&;\s'"]+)""")
_SIGNATURE: Final = re.compile(r"sig$|signature$", re.IGNORECASE)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of texts as a table; the first column is right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == 0 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def is_secret(name: str, value: object) -> bool:
    """Whether a value with a name looks like a password, a token or a key."""
    if value is None or isinstance(value, bool) or not _SECRET.search(name):
        return False
    return isinstance(value, str) or not _COUNT.search(name)


def without_password(text: str) -> str:
    """Replace the users, passwords, tokens and signatures of URLs in a text."""

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        hidden = is_secret(name, value) or _SIGNATURE.search(name)
        return f"{name}={HIDDEN if hidden else value}"

    return _OPTION_OF_URL.sub(option, _USER_OF_URL.sub(HIDDEN, text))


def has_password(text: str) -> bool:
    """Whether a text holds the user, password, token or signature of a URL."""
    return without_password(text) != text


def encodable(text: str) -> str:
    """A text as UTF-8 can hold it: of file names in another encoding, some bytes are escaped."""
    return text.encode(errors="backslashreplace").decode()


def without_secret(name: str, value: object) -> object:
    """A value with a name; hidden if it looks like a secret, and without the passwords of URLs."""
    if is_secret(name, value):
        return HIDDEN
    return without_password(value) if isinstance(value, str) else value


def broken(line: str, columns: int, indent: int = 2) -> str:
    """Break a line between words, so that it fits into a terminal; words stay in one piece.

    Args:
        line: the line.
        columns: width of the terminal; 0 leaves the line as it is.
        indent: number of spaces at the begin of all lines but the first; half the width at most.
    """
    if not columns or len(line) <= columns:
        return line
    width = max(columns, _LEAST_COLUMNS)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * min(indent, width // 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def bytes_text(count: float) -> str:
    """A size for people: "1.9 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def sizes_text(*sizes: float) -> list[str]:
    """Sizes for people, all in bytes where they differ but would look the same."""
    texts = [bytes_text(size) for size in sizes]
    if len({*texts}) < len({*sizes}):
        return [f"{size:,.0f} bytes" for size in sizes]
    return texts


def count_text(count: int, what: str) -> str:
    """How many of something: "1 rank", "1,024 ranks"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def duration_text(seconds: float) -> str:
    """A time for people, in its two largest units: "42 s", "3 min 5 s", "2 h 13 min", "4 d 1 h"."""
    whole = max(0, round(seconds))
    for (unit, size), (part, smaller) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {part}"
    return f"{whole} s"


def rate_text(rate: float) -> str:
    """A rate for people, with three digits or all before the point: "0.0312", "19.4", "1,234"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers, with runs of neighbours as ranges: "ranks 1, 3-6"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def names_text(what: str, names: Sequence[str]) -> str:
    """Name one or several things, of many only the first: "hosts a, b, c, d and 60 more"."""
    shown = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{what}{'s' * (len(names) > 1)} {shown}{f' and {more} more' if more > 0 else ''}"


def spans(ranks: Sequence[int]) -> str:
    """Format numbers with runs of neighbours as ranges: "1, 3-6", "0, 2, 4, ... (32 in all)"."""
    groups: list[list[int]] = []
    for rank in sorted(ranks):
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    shown = [str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups]
    if len(shown) > _MAX_SPANS:
        shown = [*shown[: _MAX_SPANS - 1], f"... ({len(ranks)} in all)"]
    return ", ".join(shown)


def memory_text(count: float) -> str:
    """An amount of memory, in the units of containers' limits: "412 MiB", "7.5 GiB"."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if abs(size) >= 100 or unit == "B" else f"{size:.1f} {unit}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with three digits."""
    number = seconds * 1e3
    return "0 ms" if number < 0.01 else f"{number:.3g} ms" if number < 1e3 else f"{number:,.0f} ms"
