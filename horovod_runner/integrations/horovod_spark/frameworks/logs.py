"""Logs that a framework writes on rank 0: in a local folder first, then in the store."""

from __future__ import annotations

from pathlib import Path

from horovod_runner.host.folders.urls import file_system


def copy_to_store(folder: Path, url: str | None) -> None:
    """Copy the files of a folder, if there are any, to a folder of any filesystem.

    Args:
        folder: a local folder, which need not exist.
        url: the run's logs in the store; None copies nothing.
    """
    if url is None or not folder.exists():
        return
    filesystem, target = file_system(url)
    for path in folder.rglob("*"):
        if path.is_file():
            name = f"{target}/{path.relative_to(folder)}"
            filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            filesystem.put_file(str(path), name)
