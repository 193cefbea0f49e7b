"""Opens the folder that a path or URL names."""

from __future__ import annotations

from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.folder import Folder, local_path
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.remote import RemoteFolder
from horovod_runner.host.folders.urls import check_reachable


def open_folder(url: str, *, check: bool = False) -> Folder:
    """Open the folder of a path or URL; ``check`` that HDFS answers. Does not create it.

    Raises:
        CheckpointError: fsspec, or its package for such a URL, is not installed; or HDFS does not
            answer.
    """
    path = local_path(url)
    if path is not None:
        return LocalFolder(path)
    try:
        if check:
            check_reachable(url)
        return RemoteFolder(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"checkpoint_dir={url!r} cannot be used: {error}") from None
