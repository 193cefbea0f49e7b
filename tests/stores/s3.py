"""An S3 server of moto's, that fails as stores do.

The tests, and ranks over HTTP (``/-/refused``), see how often it refused a request.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any, Literal

Fault = Literal["busy", "torn"]
_ERRORS = {
    "busy": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
}


class Faults:
    """Stands before the server.

    Args:
        server: the WSGI application.

    Attributes:
        faults: what happens to the next uploads of a file, by a part of its name.
        expired: the session token that has expired for uploads of files with a part of these names,
            which may hold "*".
        refused: how often each fault happened.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self.faults: dict[str, list[Fault]] = {}
        self.expired: tuple[str, tuple[str, ...]] = ("", ())
        self.refused: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/-/refused":
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [str(self.refused.total()).encode()]
        if environ["REQUEST_METHOD"] == "PUT":
            token, names = self.expired
            is_expired = environ.get("HTTP_X_AMZ_SECURITY_TOKEN") == token
            if is_expired and any(fnmatch(path, f"*{name}*") for name in names):
                return self._refuse("expired", environ, start_response)
            for name, faults in self.faults.items():
                if name in path and faults:
                    fault = faults.pop(0)
                    if fault == "torn":
                        return self._tear(environ)
                    return self._refuse(fault, environ, start_response)
        return self._server(environ, start_response)  # type: ignore[no-any-return]

    def _refuse(self, fault: str, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = _ERRORS[fault]
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
        start_response(status, headers)
        self.refused[fault] += 1
        return [text]

    def _tear(self, environ: dict[str, Any]) -> list[bytes]:
        """Cut the connection in the middle of an upload."""
        environ["wsgi.input"].read(1000)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        self.refused["torn"] += 1
        raise ConnectionAbortedError("in the middle of an upload")


class Server:
    """Serves on this machine until :meth:`close`.

    Attributes:
        url: of the server.
        faults: how it fails.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: object) -> None:
                """Nothing: what it refuses is meant to be refused."""

        self.faults = Faults(DomainDispatcherApplication(create_backend_app))
        self._server = make_server("127.0.0.1", 0, self.faults, True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        request = urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")
        urllib.request.urlopen(request).close()  # moto remembers the buckets of earlier servers

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
