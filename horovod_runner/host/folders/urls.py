"""Connects to the file system of a URL through fsspec, or says what is missing for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from horovod_runner.common.text import without_password
from horovod_runner.host.folders import hdfs

# By what to install. fsspec itself names the packages of other schemes.
_PACKAGES: Final[Mapping[str, str]] = {
    "hdfs": "horovod_runner[hdfs]",
    "viewfs": "horovod_runner[hdfs]",
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
_HADOOP_CONF: Final = ("HADOOP_CONF_DIR", "HADOOP_HOME")
# Where Spark puts the driver's HADOOP_CONF_DIR in a container of YARN's.
_IN_CONTAINER: Final = Path("__spark_conf__") / "__hadoop_conf__"
_WHERE: Final = "Install it on the driver and on the executors."


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """Connect to the file system of a path or URL; returns it and the path there.

    Raises:
        ImportError: fsspec, or its package for such a URL, is not installed.
        ValueError: fsspec knows no such URL, or Hadoop's configuration does not name its host.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    shown = without_password(url)
    try:
        import fsspec
    except ImportError as error:
        packages = f"fsspec '{_PACKAGES[scheme]}'" if scheme in _PACKAGES else "fsspec"
        raise ImportError(f"{shown} requires fsspec: pip install {packages}. {_WHERE}") from (error)
    if scheme in hdfs.SCHEMES:
        _require_hdfs(url)
    try:
        opened = hdfs.as_in_token(url) if scheme in hdfs.SCHEMES else url
        files, path = fsspec.core.url_to_fs(opened, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        advice = f"pip install '{package}'" if package else str(error)
        raise ImportError(
            f"{shown} requires a package that is not installed: {advice}. {_WHERE}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{shown} cannot be opened: {error}. Correct the URL, or install the package that "
            "brings its scheme to fsspec. A path without a scheme is a folder of the driver's "
            "machine."
        ) from None
    except RuntimeError as error:
        if scheme not in hdfs.SCHEMES:
            raise
        raise ValueError(
            f"hdfs-native cannot open {shown}: {hdfs.problem(error)}. Set HADOOP_CONF_DIR "
            "to the folder with core-site.xml and hdfs-site.xml, or name the NameNode's host and "
            "port in the URL."
        ) from None
    if scheme in hdfs.SCHEMES:
        hdfs.keep_in_children(sys.modules[type(files).__module__])
    return files, str(path)


def _require_hdfs(url: str) -> None:
    """Refuse a URL of HDFS without the package for it.

    fsspec would try the one of pyarrow, which loads Hadoop's Java classes, and prints what is
    missing in sixty lines.
    """
    if find_spec("hdfs_native") is None:
        raise ImportError(
            f"{without_password(url)} requires hdfs-native: pip install 'horovod_runner[hdfs]'. "
            f"{_WHERE}"
        )
    os.environ.update(hadoop_variables(os.environ))


def hadoop_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process in a container of YARN's lacks: the place of Hadoop's settings.

    Empty outside such a container, or where the user has set it.
    """
    if any(name in environment for name in _HADOOP_CONF) or not _IN_CONTAINER.is_dir():
        return {}
    return {"HADOOP_CONF_DIR": str(_IN_CONTAINER.absolute())}


def check_reachable(url: str, **options: Any) -> None:
    """Connect to the file system of a URL; look whether HDFS answers, within some seconds.

    A run that has not begun need not wait until HDFS has restarted.

    Raises:
        ImportError: as :func:`file_system`.
        ValueError: as :func:`file_system`, or HDFS does not answer.
    """
    if not hdfs.is_hdfs(url):
        file_system(url, **options)
        return
    files, path = file_system(url, **hdfs.FEW_ATTEMPTS, **options)
    try:
        files.exists(path)
    except (OSError, RuntimeError) as error:
        text = hdfs.problem(error)
        advice = (
            hdfs.GET_TICKET
            if text.startswith(hdfs.KERBEROS)
            else "Check that its NameNode runs, and that host and port are right here: in the URL, "
            "or in HADOOP_CONF_DIR. On a cluster with Kerberos HADOOP_CONF_DIR must say so."
        )
        raise ValueError(f"{without_password(url)} cannot be reached: {text}. {advice}") from None
