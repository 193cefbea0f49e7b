"""What Spark Connect does not tell and is found out: slots, and the way to the driver."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner import host
from horovod_runner.launchers import connect

CLUSTER = {"spark.master": "spark://10.0.0.1:7077"}


@pytest.mark.parametrize(
    ("cores", "settings", "slots"),
    [
        (4, {"spark.master": "local[4]"}, 4),
        (4, {"spark.master": "local[4]", "spark.task.cpus": "2"}, 2),
        (4, {"spark.master": "local[4]", "spark.executor.cores": "8"}, 4),
        (8, CLUSTER, 8),
        (8, {**CLUSTER, "spark.executor.cores": "4", "spark.task.cpus": "3"}, 2),
        # Until executors have registered Spark says two cores.
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
    """As much of a Connect session as tells its server."""
    return SimpleNamespace(client=SimpleNamespace(_builder=SimpleNamespace(endpoint=endpoint)))


def test_the_driver_is_where_the_server_sees_it() -> None:
    away = "192.0.2.1"  # an address that nobody has
    try:
        own = host.address_towards(away)
    except OSError:
        pytest.skip("this host has no route to anywhere")
    assert connect.driver_host(session(f"{away}:15002"), "the-server") == own


def test_a_server_on_this_host_knows_its_address() -> None:
    assert connect.driver_host(session("127.0.0.1:15002"), "127.0.0.3") == "127.0.0.3"


def test_a_server_behind_a_tunnel_is_not_on_this_host() -> None:
    assert connect.driver_host(session("localhost:15002"), "192.0.2.1") == "127.0.0.1"


def test_the_user_may_name_the_drivers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RUNNER_DRIVER_HOST", "notebook.example")
    assert connect.driver_host(session("127.0.0.1:15002"), "127.0.0.3") == "notebook.example"


def test_a_server_whose_port_closes_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_KNOCK_SECONDS", 0.1)
    told = threading.Event()
    errors: list[Exception] = []

    def gone(error: Exception) -> None:
        errors.append(error)
        told.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect.Lookout(("127.0.0.1", port), threading.Event(), gone)
        server.accept()[0].close()
        assert not told.is_set()
    assert told.wait(30)
    assert f"127.0.0.1:{port} has ended in the middle of the run" in str(errors[0])
