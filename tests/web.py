"""Web servers of this machine for tests, and a reader of pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def _listening(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Host and port of a web server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with _listening(Handler) as host:
        yield host


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a web server for a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with _listening(partial(Quiet, directory=str(folder))) as host:
        yield f"http://{host}"


class PageReader(HTMLParser):
    """Reads a page, and checks that each element is closed.

    Attributes:
        tags: of all elements, in order.
        ids: those of elements, each with the element's tag.
        links: all addresses.
        text: what stands between tags.
        rows: the texts of the cells of all tables.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(str(page))  # Markup would escape what is added to it
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        self.ids += [(found["id"] or "", tag)] if "id" in found else []
        self.links += [found[name] or "" for name in ("href", "src") if name in found]
        if tag not in {"meta", "link", "input"}:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    @property
    def sections(self) -> list[str]:
        """The ids of the page's sections."""
        return [each for each, tag in self.ids if tag == "section"]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += data
