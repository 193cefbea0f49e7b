"""When a process may be forked, and what a fork server refuses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from horovod_runner.common.slots import Controller, Offer
from horovod_runner.driver.placement import assign
from horovod_runner.host import control_groups, gpus
from horovod_runner.task.warm import protocol, server
from horovod_runner.task.warm.fingerprint import server_name
from horovod_runner.wire.messages import Assignment
from horovod_runner.worker.startup import rank_environment
from tests.programs import run_python


def unfit(folder: Path, body: str, prelude: str = "") -> str:
    """Why a fork server cannot fork after the import of a module; runs in a separate process."""
    (folder / "imported.py").write_text(body)
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from horovod_runner.task.warm import server
{prelude}
print(server._import(["imported"])[1] or server._unfit())
"""
    return run_python(code, check=True).stdout.strip()


INSTALLED = "import sysconfig; sysconfig.get_path = lambda name: '/'"


@pytest.mark.parametrize(
    ("body", "prelude", "told"),
    [
        ("import numpy, pandas, pyarrow", INSTALLED, ""),
        (
            "raise ImportError('no libcudart')",
            "",
            "the fork server cannot import imported: ImportError('no libcudart')",
        ),
        (
            "import os; rank = os.environ.get('LOCAL_RANK', 0)",
            INSTALLED,
            "the import of imported reads LOCAL_RANK, which only a rank has",
        ),
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
            INSTALLED,
            "the imports started threads that a fork would lose: python",
        ),
        (
            "import os; os.open('/dev/zero', os.O_RDONLY)",
            f"{INSTALLED}; server._DEVICES = ('/dev/zero',)",
            "the imports opened /dev/zero: an open device cannot be forked",
        ),
        (
            "",
            "",
            "the imports include {folder}/imported.py, which is not an installed package and may "
            "change",
        ),
    ],
)
def test_only_a_process_with_one_thread_and_no_device_is_fit(
    tmp_path: Path, body: str, prelude: str, told: str
) -> None:
    problem = unfit(tmp_path, body, prelude)
    assert problem.startswith(told.format(folder=tmp_path))
    assert bool(problem) == bool(told)


def test_variables_that_imports_set_are_known(tmp_path: Path) -> None:
    body = "import os; os.environ['SET_BY_AN_IMPORT'] = '1'"
    prelude = "print(server._import(['imported'])[0])"
    assert unfit(tmp_path, body, f"{INSTALLED}; {prelude}") == "{'SET_BY_AN_IMPORT': '1'}"


@pytest.mark.parametrize(("size", "controller"), [(1, "gloo"), (4, "gloo"), (4, "mpi")])
def test_a_fork_server_has_no_variable_that_differs_between_ranks_or_runs(
    size: int, controller: Controller
) -> None:
    def variables_of(rank: int, run: str) -> dict[str, str]:
        offers = [Offer(t, "h", "h", "10.0.0.1", "e", host_gpus=("0", "1")) for t in range(size)]
        slot = assign(offers, 0.5)[rank]
        assignment = Assignment(slot, f"10.0.0.1:{run}", "10.0.0.1", int(run), {}, controller)
        visible = gpus.environment(slot, "mask")
        return rank_environment.worker_variables(slot, assignment, 8, visible, {})

    one, other = variables_of(0, "4711"), variables_of(size - 1, "4712")
    differs = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert differs <= protocol.RANK_VARIABLES


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_an_upgraded_package_needs_another_fork_server(tmp_path: Path, folder: str) -> None:
    packages = tmp_path / folder
    old = packages / "keras-3.10.0.dist-info"
    old.mkdir(parents=True)
    os.utime(packages, ns=(0, 0))  # long before the upgrade, whatever the clock's resolution

    def name() -> str:
        return server_name(os.getpid(), [str(packages)], {}, "/")

    before = name()
    assert name() == before
    old.rename(packages / "keras-3.11.0.dist-info")
    assert name() != before


def test_memory_is_short_by_a_share_of_it() -> None:
    assert not control_groups.memory_is_short()
    assert control_groups.memory_is_short(1.1)


def test_a_fork_server_and_its_clients_must_belong_to_the_same_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uid = os.getuid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(protocol.END)
        assert server._answer(ours, "", 5).ends
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        for check in (protocol.check_peer, lambda peer: server._answer(peer, "", 5)):
            with pytest.raises(ValueError, match=rf"user {uid}, .* {uid + 1}$"):
                check(ours)
