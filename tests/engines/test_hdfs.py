"""Folders on a real HDFS: the tests of every store, and what HDFS alone does."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import fsspec
import pytest

from horovod_runner import (
    CheckpointError,
    DataError,
    HorovodRunner,
    load_checkpoint,
    save_checkpoint,
)
from horovod_runner.data import parquet
from horovod_runner.host.folders.opening import open_folder
from tests.conftest import Ranks
from tests.engines import hdfs, required
from tests.engines.hadoop import Hadoop
from tests.engines.hdfs import Cluster
from tests.programs import await_condition as until
from tests.stores.any_store import AnyStore

pytestmark = [pytest.mark.places("yarn"), pytest.mark.timeout(600)]
_number = itertools.count()


class TestHdfs(AnyStore):
    """A folder of a URL that names the NameNode."""

    @pytest.fixture
    def url(self, hadoop: Hadoop) -> str:
        return f"{hadoop.url}/store-{next(_number)}"


def test_a_process_that_has_used_hdfs_can_fork(hadoop: Hadoop) -> None:
    assert open_folder(f"{hadoop.url}/before-a-fork").names() == []
    fsspec.get_filesystem_class("hdfs").clear_instance_cache()
    assert open_folder(f"{hadoop.url}/before-another-fork").names() == []
    assert fork() == 0


def test_a_rank_that_has_used_hdfs_by_itself_can_fork(hadoop: Hadoop) -> None:
    url = f"{hadoop.url}/"

    def main() -> int | None:
        fsspec.core.url_to_fs(url)[0].exists("/")
        return fork()

    assert HorovodRunner(np=-1).run(main) == 0


def fork() -> int | None:
    """Fork a process as a DataLoader with workers does; returns its exit code."""
    child = get_context("fork").Process(target=int)
    child.start()
    child.join()
    return child.exitcode


def train(steps: int, wait: Callable[[], None]) -> int:
    """Save a checkpoint at each step, from the one after the last on; returns the first of them.

    Args:
        steps: the last of them.
        wait: called on rank 0 before step 2.
    """
    import horovod.torch as hvd

    hvd.init()
    found = load_checkpoint()
    first = found.step + 1 if found else 1
    for step in range(first, steps + 1):
        if step == 2 and hvd.rank() == 0:
            wait()
        save_checkpoint({"step": step, "bytes": os.urandom(20_000_000)}, step)
        hvd.barrier()
    return first


def check_checkpoints_through(
    change: Callable[[], None], wait: Callable[[], None], url: str, url_afterwards: str
) -> None:
    """Servers change while two ranks train: no checkpoint is lost, and the training resumes."""
    kept = {"checkpoint_dir": url, "num_to_keep": None}
    runner = Ranks("local").runner(2, **kept)
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(change)
        assert runner.run(train, steps=3, wait=wait) == 1
        changed.result()
    assert [each.load()["step"] for each in runner.last_run.checkpoints] == [1, 2, 3]
    kept["checkpoint_dir"] = url_afterwards
    assert Ranks("local").runner(2, resume=True, **kept).run(train, steps=4, wait=wait) == 4


@pytest.mark.parametrize("name", ["datanode", "namenode"])
def test_a_server_restarts_while_a_checkpoint_is_written(
    hadoop: Hadoop, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{hadoop.url}/restart-of-{name}"
    held = hadoop.daemons["datanode"].pid

    def hold() -> None:
        until(lambda: any("step-1-" in each for each in markers(url)))
        os.kill(held, signal.SIGSTOP)  # the next file is begun, and gets no further

    def restart() -> None:
        folder = open_folder(url)
        until(lambda: any("step-2-" in each for each in folder.names()))
        hadoop.restart(name)
        if name == "namenode":
            hadoop.daemons["datanode"].kill(signal.SIGCONT)

    check_checkpoints_through(restart, hold, url, url)
    assert "could not be written" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def name_nodes() -> Iterator[Cluster]:
    """Two NameNodes."""
    with required(hdfs.two_name_nodes()) as cluster:
        yield cluster


def test_the_other_name_node_takes_the_next_checkpoints(
    name_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(name_nodes.conf))
    url = f"{name_nodes.url}/checkpoints"

    def wait() -> None:
        until(lambda: open_folder(url).size("nn2-is-active") is not None)

    def fail_over() -> None:
        folder = open_folder(url)
        until(lambda: any("step-1-" in each for each in markers(url)))
        hdfs.fail_over(name_nodes)
        folder.write("nn2-is-active", b"")

    # The first NameNode of the list is gone; `fs.defaultFS` names the service.
    check_checkpoints_through(fail_over, wait, url, "hdfs:///checkpoints")


@pytest.fixture(scope="module")
def kerberos() -> Iterator[Cluster]:
    """HDFS that knows its users by Kerberos alone."""
    with required(hdfs.with_kerberos()) as cluster:
        yield cluster


@pytest.fixture
def secure(kerberos: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The same; this process is its user, and has a ticket and no connection."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(kerberos.conf))
    for name, value in kerberos.variables.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("hdfs").clear_instance_cache()
    return kerberos


class TestHdfsWithKerberos(AnyStore):
    """A folder of a cluster that asks for a ticket, and encrypts what it sends."""

    @pytest.fixture
    def url(self, secure: Cluster) -> str:
        return f"{secure.url}/store-{next(_number)}"


@pytest.mark.parametrize("named", ["by the host's name", "by the settings"])
def test_a_delegation_token_is_enough_for_ranks(
    secure: Cluster, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(hdfs.fetch_token(secure)))
    monkeypatch.setenv("KRB5CCNAME", "FILE:/no/ticket")
    folder = f"tokens-{next(_number)}"
    url = f"{secure.url}/{folder}" if named == "by the host's name" else f"hdfs:///{folder}"

    def main() -> tuple[str, str]:
        save_checkpoint({"step": 1}, 1)
        return os.environ["KRB5CCNAME"], os.environ["KRB5_CONFIG"]

    runner = Ranks("local").runner(2, checkpoint_dir=url)
    assert runner.run(main) == ("FILE:/no/ticket", secure.variables["KRB5_CONFIG"])
    assert runner.last_run.latest_checkpoint.load() == {"step": 1}


def test_a_missing_ticket_is_named_before_a_run_starts(
    secure: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KRB5CCNAME", "FILE:/no/ticket")
    with pytest.raises(CheckpointError) as caught:
        Ranks("local").runner(2, checkpoint_dir=f"{secure.url}/a").run(print)
    assert "Kerberos: No credentials were supplied" in str(caught.value)
    assert "(default cache: FILE:/no/ticket). Get a Kerberos ticket" in str(caught.value)
    assert str(caught.value).count("kinit") == 1
    assert "GSSAPI" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(DataError, match="kinit"):
        Ranks("local").runner(2).run(lambda rows: None, rows=parquet(f"{secure.url}/rows"))
    assert "".join(capfd.readouterr()) == ""


def markers(url: str) -> list[str]:
    """The names of the markers of complete checkpoints in a folder."""
    names = open_folder(url).names()
    return [each for each in names if each.startswith("checkpoint-") and each.endswith(".json")]
