"""Logs that a framework writes on rank 0: in a local folder first, then in the store."""

from __future__ import annotations

from pathlib import Path


def copy_to_store(folder: Path, url: str | None) -> None:
    """Copy the files of a folder, if there are any, to a folder of any filesystem.

    Args:
        folder: a local folder, which need not exist.
        url: the run's logs in the store; None copies nothing.
    """
    import fsspec

    if url is None or not folder.exists():
        return
    filesystem, target = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            name = f"{target}/{path.relative_to(folder)}"
            filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(path), name)
