"""When a process is fit to be forked from."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from horovod_runner import environment, forkserver, gpu, warm
from horovod_runner.messages import Assignment, Controller
from horovod_runner.topology import Offer, assign


def unfit(folder: Path, body: str, prelude: str = "") -> str:
    """What a fork server says after the import of a module, in a process of its own."""
    (folder / "imported.py").write_text(textwrap.dedent(body))
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from horovod_runner import forkserver
{prelude}
print(forkserver._import(["imported"])[1] or forkserver._unfit())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout.strip()


INSTALLED = "import sysconfig; sysconfig.get_path = lambda name: '/'"


def test_a_process_with_one_thread_and_no_device_is_fit(tmp_path: Path) -> None:
    assert unfit(tmp_path, "import numpy, pandas, pyarrow", INSTALLED) == ""


def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    said = unfit(tmp_path, "raise ImportError('no libcudart')")
    assert said == "the fork server cannot import imported: ImportError('no libcudart')"


def test_imports_that_ask_for_what_only_a_rank_has_are_told(tmp_path: Path) -> None:
    said = unfit(tmp_path, "import os; rank = os.environ.get('LOCAL_RANK', 0)", INSTALLED)
    assert said == "the import of imported asks for LOCAL_RANK, which only a rank has"


def test_what_imports_change_of_the_environment_is_known(tmp_path: Path) -> None:
    body = "import os; os.environ['SET_BY_AN_IMPORT'] = '1'"
    prelude = "print(forkserver._import(['imported'])[0])"
    assert unfit(tmp_path, body, f"{INSTALLED}; {prelude}") == "{'SET_BY_AN_IMPORT': '1'}"


@pytest.mark.parametrize(("size", "controller"), [(1, "gloo"), (4, "gloo"), (4, "mpi")])
def test_a_fork_server_has_nothing_that_differs_among_ranks_and_runs(
    size: int, controller: Controller
) -> None:
    def of(rank: int, run: str) -> dict[str, str]:
        offers = [Offer(t, "h", "h", "10.0.0.1", "e", host_gpus=("0", "1")) for t in range(size)]
        slot = assign(offers, 0.5)[rank]
        assignment = Assignment(slot, f"10.0.0.1:{run}", "10.0.0.1", int(run), {}, controller)
        gpus = gpu.environment(slot, "mask")
        return environment.worker_variables(slot, assignment, 8, gpus, {})

    one, other = of(0, "4711"), of(size - 1, "4712")
    differs = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert differs <= warm.OF_A_RUN


def test_threads_that_a_fork_would_lose_are_told(tmp_path: Path) -> None:
    body = """
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    """
    said = unfit(tmp_path, body, INSTALLED)
    assert said.startswith("the imports left threads that a fork would lose: python")


def test_open_devices_are_told(tmp_path: Path) -> None:
    body = "import os; os.open('/dev/zero', os.O_RDONLY)"
    said = unfit(tmp_path, body, f"{INSTALLED}; forkserver._DEVICES = ('/dev/zero',)")
    assert said == "the imports opened /dev/zero: a device cannot be forked"


def test_modules_that_are_installed_nowhere_are_told(tmp_path: Path) -> None:
    said = unfit(tmp_path, "")
    assert said == (
        f"the imports took {tmp_path}/imported.py, which is installed nowhere and may change"
    )


def test_memory_is_short_by_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not forkserver._memory_is_short()
    monkeypatch.setattr(forkserver, "_MEMORY_SHARE", 1.1)
    assert forkserver._memory_is_short()


def test_a_fork_server_and_those_who_ask_it_are_one_users(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getuid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(warm.END)
        assert forkserver._answer(ours, "") is None
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        for look in (warm.check_peer, lambda peer: forkserver._answer(peer, "")):
            with pytest.raises(ValueError, match=f"the other end is user {own}'s"):
                look(ours)


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which a kernel seems to tell of this process's memory."""
    folder = tmp_path / "sys/fs/cgroup/pod/42"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/42\n")

    def path(root: str, *others: str) -> Path:
        return Path(f"{tmp_path}{root}", *others)

    monkeypatch.setattr(forkserver, "Path", path)
    return folder


@pytest.mark.parametrize(
    ("limit", "used", "files", "is_short"),
    [
        ("1000", 951, 0, True),
        ("1000", 949, 0, False),
        ("1000", 990, 500, False),  # the kernel gives up files that nobody has in use
        ("1000", 1000, 20, True),
        ("max", 951, 0, False),
    ],
)
def test_a_containers_memory_may_be_short_where_the_machines_is_not(
    container: Path, limit: str, used: int, files: int, is_short: bool
) -> None:
    (container / "memory.max").write_text(f"{limit}\n")
    (container / "memory.current").write_text(f"{used}\n")
    (container / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")
    assert forkserver._memory_is_short() == is_short
