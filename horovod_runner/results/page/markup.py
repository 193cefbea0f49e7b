"""Builds HTML and SVG: every text is escaped unless it is markup already."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

# Characters that HTML forbids, and those of terminals: all control characters but tab and newline.
_FORBIDDEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_WITHOUT_END: Final = {"link", "meta"}


class Html(str):
    """A text that is markup; other strings are escaped."""

    __slots__ = ()


Child = str | None


def text(value: object) -> Html:
    """Escape a value, for an element or an attribute."""
    return Html(escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True))


def join(parts: Iterable[Child]) -> Html:
    """Put texts and markup after one another; None is left out."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts if part))


def element(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: of the element.
        children: texts, which are escaped; markup; None for nothing.
        attributes: their values are escaped. None and False leave an attribute out, True gives one
            without a value. ``class_`` is class, ``data_rank`` is data-rank.
    """
    written = "".join(
        f" {key.strip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _WITHOUT_END:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], kinds: str = "") -> Html:
    """Return a table in a box that scrolls where it is too wide.

    Args:
        head: the names of the columns.
        rows: the cells.
        kinds: for each column "r" if it is right-aligned, "n" if its lines are not broken;
            otherwise any other character.
    """
    names = list(head)
    classes = [kind if kind in "rn" else None for kind in kinds.ljust(len(names), "-")]
    heads = [element("th", n, class_=c, scope="col") for n, c in zip(names, classes, strict=True)]
    body = [
        element("tr", *(element("td", n, class_=c) for n, c in zip(row, classes, strict=True)))
        for row in rows
    ]
    inner = element("table", element("thead", element("tr", *heads)), element("tbody", *body))
    return element("div", inner, class_="scroll", tabindex="0")


class Section(NamedTuple):
    """A part of the page: the id of its element, its title, and what is below the title."""

    name: str
    title: str
    body: Html


def section(name: str, title: str, *children: Child) -> Section:
    """Return a section of the page."""
    return Section(name, title, join(children))


def document(title: str, main: Html, *, style: str = "", script: str = "") -> Html:
    """Return a whole page that loads nothing from elsewhere, in the look of this room's style.css.

    Args:
        title: of the page.
        main: what it shows.
        style: more CSS.
        script: the only script that the browser runs, whatever an error in this package lets
            through.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"'sha256-{digest}'" if script else "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}; "
        "img-src data:; form-action 'none'; base-uri 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Html(resource(__package__, "style.css") + style)),
    )
    body = element(
        "body", element("main", main), element("script", Html(script)) if script else None
    )
    return join([Html("<!doctype html>\n"), element("html", head, body, lang="en")])


def resource(package: str, name: str) -> str:
    """The text of a file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def write(text: str, to: Path) -> None:
    """Write a page to a file that only this user can read.

    Raises:
        OSError: the file cannot be written.
    """
    with open(to, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text.encode(errors="replace"))
