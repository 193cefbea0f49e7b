"""Stores of ``horovod.spark.common.store``: folders for checkpoints, logs, and rows in Parquet."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from horovod_runner.host.folders.folder import local_path
from horovod_runner.host.folders.urls import file_system
from horovod_runner.host.network import host_id
from horovod_runner.host.scratch import temporary_folder

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]

_LOGS: Final = "logs"


class Store:
    """The folders of Horovod's estimators; ``Store.create(path)`` makes one.

    A store of your own overrides the methods that return paths.
    """

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> FilesystemStore:
        """Make the store of a folder: a path, or a URL that fsspec knows."""
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        if DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    def get_train_data_path(self, idx: Any = None) -> str:
        """Where the rows to train with are, as Parquet files."""
        raise NotImplementedError

    def get_val_data_path(self, idx: Any = None) -> str:
        """Where the rows to validate with are, as Parquet files."""
        raise NotImplementedError

    def saving_runs(self) -> bool:
        """Whether runs save checkpoints and logs."""
        raise NotImplementedError

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The folder of a run's checkpoints; None if runs are not saved."""
        raise NotImplementedError

    def get_logs_path(self, run_id: str) -> str | None:
        """The folder of a run's logs; None if runs are not saved."""
        raise NotImplementedError


class FilesystemStore(Store):
    """A store in a folder of any filesystem that fsspec knows.

    Args:
        prefix_path: the folder: a path, or a URL.
        train_path: where the rows to train with are, instead of a folder in ``prefix_path``.
        val_path: where the rows to validate with are.
        test_path: where rows to test with are.
        runs_path: where the runs' folders are.
        save_runs: whether runs save checkpoints and logs.
        storage_options: options for fsspec.
        checkpoint_filename: not used: checkpoints have this package's names.
    """

    def __init__(  # noqa: PLR0917 - as Horovod's
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(str(prefix_path))
        self._train_path = self._folder(train_path, "intermediate_train_data")
        self._val_path = self._folder(val_path, "intermediate_val_data")
        self._test_path = self._folder(test_path, "intermediate_test_data")
        self._runs_path = self._folder(runs_path, "runs")
        self._save_runs = save_runs
        self.storage_options = dict(storage_options or {})
        self.checkpoint_filename = checkpoint_filename or "checkpoint"

    def _folder(self, given: str | None, name: str) -> str:
        if given is not None:
            return self.get_full_path(given)
        return posixpath.join(self.prefix_path, name)

    @property
    def fs(self) -> Any:
        """The filesystem, of fsspec."""
        return file_system(self.prefix_path, **self.storage_options)[0]

    def get_full_path(self, path: str) -> str:
        """A path as a URL; a URL stays as it is."""
        local = local_path(path)
        return path if local is None else f"file://{local.absolute()}"  # nothing decodes %20 again

    def get_full_path_fn(self) -> Callable[[str], str]:
        """:meth:`get_full_path`, as a function."""
        return self.get_full_path

    def get_localized_path(self, path: str) -> str:
        """A path or URL as the filesystem takes it."""
        return str(self.fs._strip_protocol(path))

    def exists(self, path: str) -> bool:
        """Whether there is something at a path."""
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return bytes(self.fs.cat_file(self.get_localized_path(path)))

    def write_text(self, path: str, text: str) -> None:
        """Write a file."""
        self.fs.pipe_file(self.get_localized_path(path), text.encode())

    def get_train_data_path(self, idx: Any = None) -> str:
        """See :class:`Store`."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: Any = None) -> str:
        """See :class:`Store`."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: Any = None) -> str:
        """Where the rows to test with are, as Parquet files."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there are Parquet files in a folder."""
        folder = self.get_localized_path(path)
        return bool(self.fs.glob(posixpath.join(folder, "*.parquet")))

    def get_data_metadata_path(self, path: str) -> str:
        """The path of Horovod's cache of metadata for rows; this package writes nothing there."""
        return f"{self.get_localized_path(path).rstrip('/')}_{host_id()}_cached_metadata.pkl"

    def get_parquet_dataset(self, path: str) -> Any:
        """The Parquet files in a folder, as PyArrow's ``ParquetDataset``."""
        from pyarrow.parquet import ParquetDataset

        return ParquetDataset(self.get_localized_path(path), filesystem=self.fs)

    def get_filesystem(self) -> Any:
        """The filesystem, of fsspec."""
        return self.fs

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """A function that makes a context: a temporary folder of this host, removed at its end."""
        del run_id
        return partial(temporary_folder, "run")

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A function that copies what is in a local folder into a run's folder."""

        def copy(folder: str) -> None:
            _copy(Path(folder), self.fs, self.get_localized_path(self.get_run_path(run_id)))

        return copy

    def to_remote(self, run_id: str, dataset_idx: Any = None) -> SimpleNamespace:
        """The paths of a run and its rows as plain attributes, as a rank may use them."""
        return SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether this class takes a path."""
        del path
        return True

    def saving_runs(self) -> bool:
        """See :class:`Store`."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """The folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """The folder of a run."""
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """See :class:`Store`."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = "") -> list[str]:
        """The files of a run's checkpoints whose names have an ending."""
        folder = self.get_localized_path(self.get_run_path(run_id))
        return sorted(
            str(name) for name in self.fs.ls(folder, detail=False) if name.endswith(suffix)
        )

    def get_logs_path(self, run_id: str) -> str | None:
        """See :class:`Store`."""
        return posixpath.join(self.get_run_path(run_id), _LOGS) if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """The name of the folder of logs in a run's folder."""
        return _LOGS

    def get_checkpoint_filename(self) -> str:
        """The name that Horovod gave its checkpoint."""
        return self.checkpoint_filename


#: Horovod's older names for the same.
AbstractFilesystemStore = FilesystemStore
LocalStore = FilesystemStore


class HDFSStore(FilesystemStore):
    """A store on HDFS, by hdfs-native: ``pip install 'horovod_runner[hdfs]'``.

    Args:
        prefix_path: ``hdfs://host:8020/path``, ``hdfs:///path`` or ``/path``.
        host: the name node, instead of the URL's.
        port: its port, where there is a host.
        user: not supported: set HADOOP_USER_NAME.
        kerb_ticket: not supported: set KRB5CCNAME.
        driver: not needed.
        extra_conf: settings of HDFS.
        options: the other arguments of :class:`FilesystemStore`.

    Raises:
        ValueError: it is the URL of another filesystem, has no path, or an argument is not
            supported.
    """

    FS_PREFIX: Final = "hdfs://"

    def __init__(  # noqa: PLR0917 - as Horovod's
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        del driver
        scheme, separator, rest = prefix_path.rpartition("://")
        if separator and scheme != "hdfs":
            raise ValueError(
                f"HDFSStore takes a URL that begins with hdfs:// or a path, not {prefix_path!r}: "
                "Store.create takes any URL"
            )
        address, _, path = rest.partition("/")
        if not path or (address and not separator):
            raise ValueError(
                f"HDFSStore needs the whole path of a folder, and {prefix_path!r} has none: "
                "hdfs://host:8020/path"
            )
        named, _, its_port = address.partition(":")
        place = ":".join(str(each) for each in (host or named, port or its_port) if each)
        #: The beginning of the URLs, with host and port: the ranks open them, too.
        self._url_prefix = f"{self.FS_PREFIX}{place if host or named else ''}"
        for name, value, variable in (
            ("user", user, "HADOOP_USER_NAME"),
            ("kerb_ticket", kerb_ticket, "KRB5CCNAME"),
        ):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}: HDFS's client reads it from the environment. Set "
                    f"{variable} for this process and for the executors (spark.executorEnv)"
                )
        storage = {**(extra_conf or {}), **(options.pop("storage_options", None) or {})}
        super().__init__(f"/{path}", storage_options=storage, **options)

    def get_full_path(self, path: str) -> str:
        """See :class:`FilesystemStore`; a path without a scheme or a host is on this HDFS."""
        inside = path.removeprefix(self.FS_PREFIX)
        has_host = self.matches(path) and not inside.startswith("/")
        return path if has_host else f"{self._url_prefix}{inside}"

    def get_localized_path(self, path: str) -> str:
        """A path or URL without scheme, host and port."""
        return path.removeprefix(self._url_prefix)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Whether a path is on HDFS."""
        return path.startswith(cls.FS_PREFIX)


class DBFSLocalStore(FilesystemStore):
    """A store on Databricks' file system, by its folder ``/dbfs``.

    Args:
        prefix_path: ``/dbfs/path``, ``dbfs:/path``, ``file:/dbfs/path`` or ``file:///dbfs/path``.
        options: the other arguments of :class:`FilesystemStore`.

    Raises:
        ValueError: it is another path.
    """

    def __init__(self, prefix_path: str, *args: Any, **options: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **options)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Whether a path is on Databricks' file system."""
        return _of_dbfs(path) is not None

    @staticmethod
    def normalize_path(path: str) -> str:
        """A path in the form ``/dbfs/path``.

        Raises:
            ValueError: it is another path.
        """
        normal = _of_dbfs(path)
        if normal is None:
            raise ValueError(
                f"{path!r} is not on Databricks' file system: begin with /dbfs/, dbfs:/ or "
                "file:/dbfs/; Store.create takes any path"
            )
        return normal

    def get_full_path(self, path: str) -> str:
        """See :class:`FilesystemStore`."""
        return f"file://{self.normalize_path(path)}"


def copy_to_store(folder: Path, url: str | None) -> None:
    """Copy the files of a folder, if it exists, to one of any filesystem; None copies nothing."""
    if url is None or not folder.exists():
        return
    _copy(folder, *file_system(url))


def _copy(folder: Path, filesystem: Any, target: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            name = posixpath.join(target, path.relative_to(folder).as_posix())
            filesystem.makedirs(posixpath.dirname(name), exist_ok=True)
            filesystem.put_file(str(path), name)


def _of_dbfs(path: str) -> str | None:
    if path.startswith("dbfs:/") and not path.startswith("dbfs://"):
        return f"/dbfs{path.removeprefix('dbfs:')}"
    local = local_path(path) if path.startswith("file:") else Path(path)
    return str(local) if str(local).startswith("/dbfs/") else None
