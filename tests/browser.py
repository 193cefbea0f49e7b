"""Opens pages in a real browser, Debian's Chromium without a window."""

from __future__ import annotations

import re
import shutil
from html import escape, unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.hpc import require
from tests.programs import run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
_ANSWER = re.compile(r'<pre id="test-answer">(.*?)</pre>', re.DOTALL)


class Browser:
    """Opens pages; each in a process with a new profile below ``folder``."""

    def __init__(self, folder: Path) -> None:
        require("" if CHROMIUM else "not installed: Chromium")
        self._folder = folder
        self._opened = 0

    def open(self, address: str) -> tuple[str, list[str]]:
        """Open a page.

        Args:
            address: of the page.

        Returns:
            The page as HTML after its scripts have run, and what was written to the console, which
            includes all errors.
        """
        self._opened += 1
        profile = self._folder / f"profile-{self._opened}"
        options = (*_OPTIONS, f"--user-data-dir={profile}", "--window-size=1400,1000")
        done = run(CHROMIUM, *options, "--dump-dom", address, timeout=120, check=True)
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, said

    def ask(self, page: str, expression: str, width: int = 1280) -> Any:
        """Evaluate a JavaScript expression in a copy of a page that may run any script.

        The copy is in a frame: a window without a frame is never narrower than 500 pixels.

        Returns:
            The value, which JSON can hold.
        """
        copy, found = _POLICY.subn("", page)
        assert found == 1
        script = (
            "addEventListener('load', () => { document.querySelector('pre').textContent ="
            f" JSON.stringify(frames[0].eval({msgspec.json.encode(expression).decode()})); }});"
        )
        path = self._folder / f"frame-{self._opened}.html"
        path.write_text(
            f'<!doctype html><iframe srcdoc="{escape(copy)}" style="border: 0; width: {width}px; '
            f'height: 900px"></iframe><pre id="test-answer"></pre><script>{script}</script>'
        )
        dom, said = self.open(path.as_uri())
        assert said == []
        (answer,) = _ANSWER.findall(dom)
        return msgspec.json.decode(unescape(answer))


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    """A browser; the test is skipped where there is none, and fails if CI is set."""
    return Browser(tmp_path)
