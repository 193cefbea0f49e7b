"""Spark: the number of slots, the driver's address as executors reach it, and what is refused."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.errors import SlotError
from horovod_runner.host import network
from horovod_runner.launchers import connect
from horovod_runner.launchers.spark import SparkLauncher

CLUSTER = {"spark.master": "spark://10.0.0.1:7077"}


@pytest.mark.parametrize(
    ("cores", "settings", "slots"),
    [
        (4, {"spark.master": "local[4]"}, 4),
        (4, {"spark.master": "local[4]", "spark.task.cpus": "2"}, 2),
        (4, {"spark.master": "local[4]", "spark.executor.cores": "8"}, 4),
        (8, CLUSTER, 8),
        (8, {**CLUSTER, "spark.executor.cores": "4", "spark.task.cpus": "3"}, 2),
        # Until executors have registered, Spark reports two cores.
        (2, {**CLUSTER, "spark.executor.cores": "4"}, 0),
        (
            8,
            {
                **CLUSTER,
                "spark.executor.cores": "4",
                "spark.executor.resource.gpu.amount": "1",
                "spark.task.resource.gpu.amount": "0.5",
            },
            4,
        ),
    ],
)
def test_slots_follow_from_cores_and_settings(
    cores: int, settings: dict[str, str], slots: int
) -> None:
    assert connect.slots_of(cores, settings.get) == slots


def session(endpoint: str) -> Any:
    """The part of a Connect session that holds the server's address."""
    return SimpleNamespace(client=SimpleNamespace(_builder=SimpleNamespace(endpoint=endpoint)))


def test_the_drivers_address_is_the_one_towards_the_server() -> None:
    remote = "192.0.2.1"  # an address that no machine has
    try:
        address = network.address_towards(remote)
    except OSError:
        pytest.skip("this host has no default route")
    assert connect.driver_host(session(f"{remote}:15002"), "the-server") == address


@pytest.mark.parametrize(
    ("endpoint", "named", "host"),
    [
        ("127.0.0.1:15002", "127.0.0.3", "127.0.0.3"),  # the server is on this host
        ("localhost:15002", "192.0.2.1", "127.0.0.1"),  # behind a tunnel: elsewhere
    ],
)
def test_the_driver_host_of_a_server_counts_on_this_host_alone(
    endpoint: str, named: str, host: str
) -> None:
    assert connect.driver_host(session(endpoint), named) == host


def test_the_users_address_of_the_driver_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DRIVER_HOST", "notebook.example")
    assert connect.driver_host(session("127.0.0.1:15002"), "127.0.0.3") == "notebook.example"


def test_a_server_whose_port_closes_has_ended() -> None:
    ended = threading.Event()
    reasons: list[str] = []

    def on_end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect.watch_server(("127.0.0.1", port), threading.Event(), on_end, 0.3)
        server.accept()[0].close()
        assert not ended.is_set()
    assert ended.wait(30)
    assert f"127.0.0.1:{port} has ended in the middle of the run" in reasons[0]


def test_a_second_copy_of_a_task_that_runs_for_long_is_refused() -> None:
    """Spark makes no copies of the tasks of a barrier job, but of those of a pool."""
    settings = {"spark.master": CLUSTER["spark.master"], "spark.speculation": "true"}
    session: Any = SimpleNamespace(
        conf=SimpleNamespace(get=settings.get),
        sparkContext=object(),
        version="4.3.0",
    )
    launcher = SparkLauncher(session, None, print, threading.Event())
    launcher.check_pool(1)
    settings["spark.speculation.task.duration.threshold"] = "1h"
    with pytest.raises(SlotError, match=r"threshold=1h with spark\.speculation"):
        launcher.check_pool(1)
