"""A filesystem at URLs with a password, for fsspec: ``vault://me:password@host/folder``.

It is the local one, and its errors quote the URL, as those of many stores do.
"""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Vault(LocalFileSystem):
    """Refuses what has "refused" in its name, and to write what has "unwritable" in it."""

    protocol = "vault"

    def __init__(self, url: str = "", **options: Any) -> None:
        super().__init__(**{"auto_mkdir": True, **options})
        self._url = url

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        if text.startswith("vault://"):
            text = "/" + text.removeprefix("vault://").partition("/")[2].partition("?")[0]
        return super()._strip_protocol(text)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"url": path}

    def _check(self, path: Any) -> None:
        if "refused" in str(path):
            raise PermissionError(f"Access denied: {self._url} (403 Forbidden)")

    def ls(self, path: Any, *args: Any, **options: Any) -> Any:
        self._check(path)
        return super().ls(path, *args, **options)

    def put_file(self, source: Any, path: Any, **options: Any) -> Any:
        self._check(str(path).replace("unwritable", "refused"))
        return super().put_file(source, path, **options)


fsspec.register_implementation("vault", Vault, clobber=True)
