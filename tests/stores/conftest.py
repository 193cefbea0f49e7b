"""Mounts the file systems of the tests, and starts their S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores import azure as emulated
from tests.stores import mounted, require
from tests.stores.s3 import Server


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A store with the rules of Unity Catalog Volumes; see tests/stores/volume.py."""
    with mounted(tmp_path / "backing", tmp_path / "volume") as path:
        yield path


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 server with a bucket `mine`; the credentials are in a file."""
    require("moto", "s3fs", "flask_cors")
    import s3fs

    server = Server()
    credentials = tmp_path / "credentials"
    write_credentials(credentials, "first")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("mine")
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Azure's emulator with a container `mine`; the credentials are in a variable."""
    require("adlfs")
    if emulated.PROGRAM is None:
        pytest.skip("Azurite is not installed: make azurite, which needs npm")
    import adlfs

    with emulated.emulator(tmp_path / "azurite") as connection:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        adlfs.AzureBlobFileSystem().mkdir("mine")
        yield
        adlfs.AzureBlobFileSystem.clear_instance_cache()


def write_credentials(path: Path, token: str) -> None:
    """A file of credentials, as ~/.aws/credentials."""
    path.write_text(
        "[default]\naws_access_key_id=me\naws_secret_access_key=secret\n"
        f"aws_session_token={token}\n"
    )
