"""A read-only folder on a web server. It needs neither fsspec nor aiohttp."""

from __future__ import annotations

import base64
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPMessage, IncompleteRead
from pathlib import Path
from typing import IO, Any, Final, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_T = TypeVar("_T")
TIMEOUT: Final = 60  # seconds without an answer
_PAUSES: Final = (1.0, 3.0)
_BUSY: Final = (429, 500, 502, 503, 504)
_IN_A_PATH: Final = "/%!$&'()*+,;=:@~"  # what quote leaves: an escape in the URL stays one
_USER: Final = re.compile(r"(?<=://)[^/\s?#]*(?=@)")
_QUERY: Final = re.compile(r"(://[^\s?#'\"]*\?)[^\s#'\")]*")


class WebFolder:
    """A folder at an http or https URL.

    A user and password in the URL (``https://user:token@host/``) are sent as basic authentication,
    to that host alone. A query (``?signature``) is sent with each file. A malformed URL raises
    ValueError.
    """

    def __init__(self, url: str, inside: str = "", *, pauses: Sequence[float] = _PAUSES) -> None:
        self._pauses = pauses
        parts = urlsplit(url)
        user, at, host = parts.netloc.rpartition("@")
        basic = base64.b64encode(unquote(user).encode()).decode()
        self._authorization = f"Basic {basic}" if at else None
        path = quote(parts.path.rstrip("/"), safe=_IN_A_PATH)
        self._folder = "/".join([path, *filter(None, [quote(inside)])])
        self._parts = parts._replace(netloc=host, fragment="")

    def read(self, name: str) -> bytes:
        """Read a small file. Raises FileNotFoundError."""

        def read() -> bytes:
            with self._get(name) as answer:
                data: bytes = answer.read()
                return data

        return self._retried(read)

    def copy_out(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises FileNotFoundError."""

        def copy() -> None:
            with self._get(name) as answer, path.open("wb") as file:
                shutil.copyfileobj(answer, file)
                # A connection that breaks looks like the end of the file.
                whole = answer.headers.get("Content-Length")
                if whole and file.tell() != int(whole):
                    raise ConnectionError(f"{file.tell()} of {whole} bytes of {name} arrived")

        self._retried(copy)

    def write(self, name: str, data: bytes) -> None:
        """Raise OSError."""
        raise OSError("a web server can only be read")

    def move_in(self, part: Path, name: str) -> None:
        """Raise OSError."""
        self.write(name, b"")

    def _retried(self, action: Callable[[], _T]) -> _T:
        """Act; again after a pause if the server is busy or the connection broke."""
        for pause in self._pauses:
            try:
                return action()
            except Exception as error:
                if not _passing(error):
                    raise
            time.sleep(pause)
        return action()

    def _get(self, name: str) -> Any:
        url = urlunsplit(self._parts._replace(path=f"{self._folder}/{quote(name)}"))
        request = urllib.request.Request(url)  # noqa: S310 - http or https
        if self._authorization:
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            return urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                # Not the URL: it may have a password or a signature.
                raise FileNotFoundError(f"the server has no {name} ({error.code})") from error
            raise


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none from https to a connection that anyone can change."""

    def redirect_request(  # noqa: PLR0917 - urllib's
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        here, there = urlsplit(req.full_url), urlsplit(newurl)
        if there.scheme != "https" and (here.scheme, there.scheme) != ("http", "http"):
            fp.close()
            raise OSError(
                f"the server leads from {here.scheme}://{here.netloc} to "
                f"{there.scheme}://{there.hostname}, which is not followed: nothing protects files "
                "from changes on their way there"
            )
        further = super().redirect_request(req, fp, code, msg, headers, newurl)
        authorization = req.unredirected_hdrs.get("Authorization")
        if further and authorization and here.netloc == there.netloc:
            further.add_unredirected_header("Authorization", authorization)
        return further


def without_secrets(text: str) -> str:
    """Leave out the user, the password and the query of each URL in a text."""
    return _QUERY.sub(r"\1***", _USER.sub("***", text))


def _passing(error: BaseException) -> bool:
    """Whether another try may succeed: not after a timeout, which was long enough."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _BUSY
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _passing(error.reason)
    return isinstance(error, ConnectionError | IncompleteRead)
