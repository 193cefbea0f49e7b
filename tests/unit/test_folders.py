"""Folders: what errors of stores say, files from another disk, and filesystems of fsspec."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_runner.host.folders import hdfs, urls
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.problems import describe
from tests.programs import run_python


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free space"),
        (OSError(errno.EROFS, "Read-only file system"), "read-only"),
        (OSError(errno.EOPNOTSUPP, "Operation not supported"), "doctor --path"),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), "mount it again"),
        (OSError(errno.EBUSY, "Please reduce your request rate."), "allow more tries"),
        (PermissionError("The provided token has expired."), "Renew the credentials"),
        (PermissionError("Forbidden"), "the right to list, read, write and delete"),
        (FileNotFoundError("The specified bucket does not exist"), "create it"),
        (ConnectionRefusedError("refused"), "check the network"),
        (RuntimeError('Could not connect to the endpoint URL: "https://x"'), "check the network"),
        (RuntimeError("Unable to locate credentials"), "no credentials on this host"),
        (RuntimeError("429 Client Error: Too Many Requests"), "allow more tries"),
        (RuntimeError("[Errno 95] Operation not supported: 'metrics/loss'"), "doctor --path"),
        (OSError("SafeModeException: Cannot create file /a"), "has left safe mode"),
        (PermissionError(errno.EACCES, "Permission denied", "step-503"), "the right to list"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/connections"), "create it"),
        (FileNotFoundError("/data/connections/step-503"), "create it"),
        (
            OSError(errno.EIO, "Input/output error", "connections", None, "step-503"),
            "another place",
        ),
        (OSError("<Error><Code>SlowDown</Code></Error>"), "allow more tries"),
        (OSError("Forbidden: https://store/connections/step-503"), "the right to list"),
        (RuntimeError(""), r"RuntimeError\. Use another place\."),
    ],
    ids=str,
)
def test_an_error_of_a_store_says_what_to_change(error: Exception, remedy: str) -> None:
    with pytest.raises(AssertionError, match=remedy):
        raise AssertionError(describe(error))


def test_the_cause_of_an_error_counts_too() -> None:
    error = OSError("upload failed")
    error.__cause__ = RuntimeError("ExpiredToken")
    assert describe(error).startswith("upload failed. Renew the credentials")


def test_a_file_is_moved_in_from_another_disk(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one disk")
    memory = shared / f"horovod_runner-test-{os.getpid()}"
    memory.write_bytes(b"state")
    LocalFolder(tmp_path).move_in(memory, "file")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"state"
    assert not memory.exists()


def test_a_forked_child_deletes_no_client_of_hdfs() -> None:
    """A client waits at its deletion for threads, which a child has not."""
    done = run_python("""
        import os
        from types import ModuleType, SimpleNamespace
        from horovod_runner.host.folders.hdfs import keep_in_children

        class Client:
            deleted = 0

            def __del__(self):
                Client.deleted += 1

        module = ModuleType("hdfs_native.fsspec")
        module.HdfsFileSystem = SimpleNamespace(_cache={"a": Client(), "b": Client()})
        module.ViewfsFileSystem = SimpleNamespace(_cache={"c": Client()})
        keep_in_children(module)
        for _ in range(2):  # the parent keeps nothing after a fork
            child = os.fork()
            module.HdfsFileSystem._cache.clear()  # as fsspec does in a child
            module.ViewfsFileSystem._cache.clear()
            if not child:
                os._exit(Client.deleted)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), Client.deleted)
            module.HdfsFileSystem._cache["d"] = Client()
            Client.deleted = 0
    """)
    assert done.stdout.splitlines() == ["0 3", "0 1"], done.stderr


def from_server(kind: str, words: str) -> RuntimeError:
    """An error of a NameNode, as hdfs-native raises it."""
    return RuntimeError(f'RPCError("org.apache.{kind}", "{words}\\n\\tat org.A.b(A.java:1)\\n")')


def test_what_fails_while_hdfs_restarts_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "_LONGEST_PAUSE", 0.0)  # the pauses are no part of what it does
    errors = [
        from_server("SafeModeException", "Name node is in safe mode."),
        RuntimeError('OperationFailed("Failed to complete file in time")'),
        OSError("No data received for 60000ms"),
    ]

    def act() -> str:
        if errors:
            raise errors.pop()
        return "written"

    assert hdfs.repeat(act) == "written"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (from_server("SafeModeException", "Safe mode."), OSError, "SafeModeException: Safe mode"),
        (from_server("QuotaExceededException", "10 B"), OSError, "QuotaExceededException: 10 B"),
        (from_server("x.AccessControlException", "no"), PermissionError, "ControlException: no"),
        (FileNotFoundError("/a"), FileNotFoundError, "/a"),
        (OSError(errno.ENOSPC, "No space left"), OSError, "Errno 28"),
        (OSError("Connection refused (os error 111)"), OSError, "refused"),
    ],
    ids=str,
)
def test_what_hdfs_refuses_at_last_comes_without_a_stack_trace(
    error: Exception, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs, "_SECONDS", -1.0)  # three minutes
    monkeypatch.setattr(hdfs, "_gave_up", 0.0)  # of the process, and of its other tests

    def act() -> None:
        raise error

    with pytest.raises(kind, match=text) as caught:
        hdfs.repeat(act)
    assert "A.java" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("hdfs://localhost:8020/a", "hdfs://127.0.0.1:8020/a"),
        ("hdfs:///a", "hdfs://127.0.0.1:8020/a"),
        ("hdfs://localhost:9000/a", "hdfs://localhost:9000/a"),
        ("hdfs://cluster/a", "hdfs://cluster/a"),
    ],
)
def test_a_name_node_is_named_as_in_its_token(
    url: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.setenv("HADOOP_HOME", str(tmp_path))
    assert hdfs.as_in_token(url) == url
    (tmp_path / "token").write_bytes(b"HDTS..HDFS_DELEGATION_TOKEN\x0e127.0.0.1:8020")
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "token"))
    settings = {
        "dfs.blocksize": "1",
        "hadoop.tmp.dir": "/tmp",
        "fs.defaultFS": "hdfs://localhost:8020",
    }
    properties = (
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    )
    folder = tmp_path / "etc" / "hadoop"
    folder.mkdir(parents=True)
    folder.joinpath("core-site.xml").write_text(
        f"<configuration>{''.join(properties)}</configuration>"
    )
    assert hdfs.as_in_token(url) == named
    # HADOOP_CONF_DIR names the folder of the settings itself, and counts more.
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert hdfs.as_in_token(url) == (named if url.startswith("hdfs://l") else url)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))
    assert hdfs.as_in_token(url) == named


@pytest.mark.parametrize(
    ("url", "packages"),
    [
        ("s3://me:secret@bucket/a", r"fsspec 's3fs'"),
        ("gs://bucket/a", r"fsspec 'gcsfs'"),
        ("hdfs://host/a", r"fsspec 'horovod_runner\[hdfs\]'"),
        ("other://a", "fsspec"),
        ("/a/b", "fsspec"),
    ],
)
def test_without_fsspec_it_is_said_what_a_url_requires(
    url: str, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=rf"requires fsspec: pip install {packages}\. ") as caught:
        urls.file_system(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "error", "kind", "text"),
    [
        ("abfss://a", ImportError("no"), ImportError, r"^abfss://a requires .*install 'adlfs'\. "),
        ("gcs://a", ImportError("no"), ImportError, r"^gcs://a requires .*install 'gcsfs'\. "),
        ("x://a", ImportError("get x"), ImportError, r"^x://a requires .*installed: get x\. "),
        ("x://a", ValueError("no x"), ValueError, r"^x://a cannot be opened: no x\. Correct "),
        ("x://a", RuntimeError("of x"), RuntimeError, "^of x$"),
    ],
)
def test_a_url_that_cannot_be_opened_says_what_to_change(
    url: str,
    error: Exception,
    kind: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(kind, match=text):
        urls.file_system(url)


@pytest.mark.parametrize("url", ["hdfs://host:8020/a", "viewfs://cluster/a"])
def test_errors_of_opening_hdfs_say_what_to_change(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("InvalidArgument(no such host)")

    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    monkeypatch.setattr(urls, "find_spec", lambda _: None)
    with pytest.raises(
        ImportError, match=rf"^{url} requires hdfs-native: .*horovod_runner\[hdfs\]"
    ):
        urls.file_system(url)
    monkeypatch.setattr(urls, "find_spec", lambda _: True)
    with pytest.raises(ValueError, match=rf"open {url}: .*no such host.*Set HADOOP_CONF_DIR"):
        urls.file_system(url)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("refused"), "refused. Check that its NameNode runs"),
        (RuntimeError('GSSAPIError(1, 2, "No ticket")'), "Kerberos: No ticket. Get a Kerberos"),
    ],
)
def test_hdfs_that_does_not_answer_is_told_before_a_run(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def exists(path: str) -> bool:
        asked.append(path)
        if len(asked) > 1:
            raise error
        return False

    files = SimpleNamespace(exists=exists)
    monkeypatch.setattr(urls, "file_system", lambda url, **_: (files, f"path of {url}"))
    urls.check_reachable("s3://bucket/a")  # a store that is always there
    assert asked == []
    urls.check_reachable("hdfs://host/a")
    assert asked == ["path of hdfs://host/a"]
    with pytest.raises(ValueError, match=rf"^hdfs://host/a cannot be reached: {text}"):
        urls.check_reachable("hdfs://host/a")


def test_a_container_of_yarns_has_hadoops_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert urls.hadoop_variables({}) == {}
    folder = tmp_path / "__spark_conf__" / "__hadoop_conf__"
    folder.mkdir(parents=True)
    assert urls.hadoop_variables({"A": "1"}) == {"HADOOP_CONF_DIR": str(folder)}
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        assert urls.hadoop_variables({name: "/the/users"}) == {}
