"""Tests of folders on web servers: passwords, signatures, redirects, broken connections."""

from __future__ import annotations

import base64
import urllib.request
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from horovod_runner import InstallError
from horovod_runner.tools.commands import wheels
from horovod_runner.tools.commands.wheels import Place
from horovod_runner.tools.horovod_build import web
from horovod_runner.tools.horovod_build.web import WebFolder, without_secrets
from tests.web import serving


def send(
    handler: BaseHTTPRequestHandler,
    data: bytes,
    code: int = 200,
    length: int | None = None,
    **headers: str,
) -> None:
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def test_a_password_is_sent_to_its_host_alone_and_a_signature_with_each_file() -> None:
    seen: list[tuple[str, str | None]] = []

    def there(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.path, handler.headers["Authorization"]))
        send(handler, b"data")

    def here(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.path, handler.headers["Authorization"]))
        to = "/b/file" if handler.path.startswith("/a") else f"http://{other}/c"
        send(handler, b"", 302, Location=to)

    with serving(there) as other, serving(here) as host:
        assert WebFolder(f"http://me:to%40ken@{host}/a/?sig=x%2B").read("file") == b"data"
    sent = f"Basic {base64.b64encode(b'me:to@ken').decode()}"
    assert seen == [("/a/file?sig=x%2B", sent), ("/b/file", sent), ("/c", None)]


def test_names_are_quoted_and_escapes_are_kept() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, handler.path.encode())

    with serving(answer) as host:
        folder = WebFolder(f"http://{host}/ä b%20c/", "torch+cpu/0")
        assert folder.read("x+y.whl") == b"/%C3%A4%20b%20c/torch%2Bcpu/0/x%2By.whl"


@pytest.mark.parametrize("kind", ["busy", "half", "cut"])
def test_what_may_pass_is_tried_again(tmp_path: Path, kind: str) -> None:
    tries: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        tries.append(handler.path)
        if len(tries) == 3:
            send(handler, b"12345")
        elif kind == "busy":
            send(handler, b"", 503)
        elif kind == "half":
            send(handler, b"123", length=5)

    with serving(answer) as host:
        WebFolder(f"http://{host}", pauses=(0, 0)).copy_out("file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"12345"
    assert tries == ["/file"] * 3


def test_half_a_file_is_an_error_and_not_a_damaged_one(tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"123", length=5)

    with serving(answer) as host, pytest.raises(ConnectionError, match="3 of 5 bytes"):
        WebFolder(f"http://{host}", pauses=(0, 0)).copy_out("file", tmp_path / "file")


@pytest.mark.parametrize(("code", "error"), [(404, FileNotFoundError), (403, OSError)])
def test_a_refusal_is_not_asked_again(code: int, error: type[Exception]) -> None:
    tries: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        tries.append(handler.path)
        send(handler, b"", code)

    with serving(answer) as host, pytest.raises(error):
        WebFolder(f"http://{host}").read("file")
    assert len(tries) == 1


@pytest.mark.parametrize("to", ["http://a.example/x?sig=secret", "ftp://a.example/x"])
def test_a_redirect_that_gives_up_encryption_is_not_followed(to: str) -> None:
    request = urllib.request.Request("https://a.example/x")
    with Path("/dev/null").open("rb") as body:
        arguments = (request, body, 302, "Found", HTTPMessage(), to)
        with pytest.raises(
            OSError, match=r" https://a\.example .* (http|ftp)://a\.example,"
        ) as raised:
            web._Redirects().redirect_request(*arguments)
    assert "secret" not in str(raised.value)
    upgraded = web._Redirects().redirect_request(
        urllib.request.Request("http://a.example/x"), body, 302, "", HTTPMessage(), "https://b/x"
    )
    assert upgraded is not None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:to@ken@host/a?sig=x", "https://***@host/a?***"),
        ("at https://token@host: no", "at https://***@host: no"),
        ("https://host/a@b c?d", "https://host/a@b c?d"),
        ("/mnt/a@b?c", "/mnt/a@b?c"),
        ("('s3://host/a?k=v', 1)", "('s3://host/a?***', 1)"),
    ],
)
def test_a_text_without_the_secrets_of_its_urls(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_no_message_shows_a_password_or_a_signature(tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        key = b"x" if handler.path.startswith("/page") else b""
        send(handler, key, 200 if key else 403)

    said: list[str] = []
    with serving(answer) as host:
        for path in ("page", "refused"):
            place = Place(f"http://me:secret@{host}/{path}?sig=secret")
            with pytest.raises(InstallError, match=f"http://[*]{{3}}@{host}/{path}") as one:
                wheels.published(place)
            with pytest.raises(InstallError) as other:
                wheels.fetch(place, "key", tmp_path)
            said += [str(one.value), str(other.value)]
        wheel = tmp_path / "x.whl"
        wheel.touch()
        wheels.publish(place, "key", wheel, said.append)
    for url in ("http://me:secret@127.0.0.1:x/", "nonsense://me:secret@host/a?secret"):
        with pytest.raises(InstallError) as raised:
            wheels.published(Place(url))
        said.append(str(raised.value))
    assert len(said) == 7
    assert "secret" not in "".join(said)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ImportError("Install s3fs to access S3"), "Install fsspec"),
        (OSError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "Set SSL_CERT_FILE"),
        (TimeoutError("timed out"), "Check the address"),
    ],
)
def test_an_error_of_a_place_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    def read(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(WebFolder, "read", read)
    with pytest.raises(InstallError, match=f"{advice}.*, or .*--wheels"):
        wheels.published(Place("https://host.example/wheels"))
