"""Spark: the number of slots, the driver's address as executors reach it, and what is refused."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.errors import CancelledError, LaunchError, SlotError
from horovod_runner.host import network
from horovod_runner.launchers import connect, spark
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
        (
            16,
            {
                **CLUSTER,
                "spark.executor.cores": "8",
                "spark.executor.resource.gpu.amount": "2",
                "spark.task.resource.gpu.amount": "0.4",
            },
            8,
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


class Classic:
    """A session of which a launcher reads settings."""

    sparkContext: Any = object()  # noqa: N815 - Spark's name
    version = "4.3.0"

    def __init__(self, settings: dict[str, str]) -> None:
        self.conf = SimpleNamespace(get=lambda name, default=None: settings.get(name, default))


class Connected(Classic):
    """A session of Spark Connect, which has no SparkContext."""

    @property
    def sparkContext(self) -> Any:  # noqa: N802 - Spark's name
        raise RuntimeError


def launcher(
    session: Any, notices: list[str] | None = None, timeout: float | None = 0.0, **options: Any
) -> SparkLauncher:
    told = [] if notices is None else notices
    options.setdefault("cancelled", threading.Event())
    return SparkLauncher(session, timeout, told.append, **options)


def test_a_second_copy_of_a_task_that_runs_for_long_is_refused() -> None:
    """Spark makes no copies of the tasks of a barrier job, but of those of a pool."""
    settings = {**CLUSTER, "spark.speculation": "true"}
    asks = launcher(Classic(settings))
    asks.check_pool(1)
    settings["spark.speculation.task.duration.threshold"] = "1h"
    with pytest.raises(SlotError, match=r"threshold=1h with spark\.speculation"):
        asks.check_pool(1)


def test_a_resource_profile_requires_spark_4() -> None:
    session, profile = Classic({"spark.master": "yarn"}), SimpleNamespace(taskResources={})
    launcher(session, profile=profile)
    session.version = "3.5.9"
    with pytest.raises(ValueError, match=r"requires Spark 4\.0 or later, and this is 3\.5\.9"):
        launcher(session, profile=profile)


def has_slots(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    # No argument: what Spark tells cannot be given to a launcher.
    monkeypatch.setattr(spark, "_count_slots", lambda *_: count)
    monkeypatch.setattr(connect, "count_slots", lambda _: count)


@pytest.mark.parametrize(
    ("session", "size", "has", "told"),
    [
        (
            Classic({"spark.master": "local[2]"}),
            4,
            2,
            "np=4 asks for 4 slot(s) and local[2] has 2. A slot is what one task takes: "
            'spark.task.cpus=1. Lower np, or start the session with master("local[4]"), or '
            "spark-submit with --master 'local[4]'.",
        ),
        (
            Connected({"spark.master": "local[2]"}),
            4,
            2,
            "np=4 asks for 4 slot(s) and local[2] has 2. A slot is what one task takes: "
            "spark.task.cpus=1. Lower np, or start the Connect server with --master 'local[4]'.",
        ),
        (
            Classic({**CLUSTER, "spark.task.cpus": "2", "spark.task.resource.gpu.amount": "0.5"}),
            3,
            1,
            "np=3 asks for 3 slot(s) and spark://10.0.0.1:7077 has 1. A slot is what one task "
            "takes: spark.task.cpus=2 and spark.task.resource.gpu.amount=0.5. Lower np, or add "
            "executors or cores (spark.executor.instances, spark.executor.cores, "
            "spark.cores.max), or raise slot_timeout if the cluster is still growing.",
        ),
        (
            Classic({**CLUSTER, "spark.driver.host": "10.0.0.9"}),
            0,
            0,
            "np=all slots asks for 1 slot(s) and spark://10.0.0.1:7077 has 0. A slot is what one "
            "task takes: spark.task.cpus=1. Lower np, or add executors or cores "
            "(spark.executor.instances, spark.executor.cores, spark.cores.max), or raise "
            "slot_timeout if the cluster is still growing. As there is not a single one, check "
            "whether executors can reach the driver at spark.driver.host=10.0.0.9.",
        ),
    ],
)
def test_too_few_slots_say_what_to_change(
    session: Any, size: int, has: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(connect.DRIVER_HOST, raising=False)
    has_slots(monkeypatch, has)
    with pytest.raises(SlotError) as caught:
        launcher(session).slots(size)
    assert str(caught.value) == told


def test_slots_that_a_server_does_not_tell_are_taken_to_be_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_slots(monkeypatch, None)
    asks = launcher(Connected(CLUSTER))
    assert asks.slots(3) == 3
    with pytest.raises(SlotError, match=r"^np=0 .*give np as a number\.$"):
        asks.slots(0)


def test_slots_are_waited_for_in_the_first_seconds_of_an_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_slots(monkeypatch, 1)
    cancelled = threading.Event()
    cancelled.set()
    for age, error in ((0, CancelledError), (1000, SlotError)):
        began = {"spark.app.startTime": f"{int((time.time() - age) * 1000)}"}
        asks = launcher(Connected({**CLUSTER, **began}), timeout=None, cancelled=cancelled)
        with pytest.raises(error):
            asks.slots(2)
    # Nobody knows when it began; and a local master has all its slots.
    for settings in (CLUSTER, {"spark.master": "local[1]", "spark.app.startTime": "9" * 13}):
        with pytest.raises(SlotError):
            launcher(Connected(settings), timeout=None, cancelled=cancelled).slots(2)


def test_compute_with_sandboxes_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    has_slots(monkeypatch, 4)
    monkeypatch.delenv("DATABRICKS_ENV_VERSION", raising=False)
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    notices: list[str] = []
    asks = launcher(Connected(CLUSTER), notices)
    assert asks.slots(2) == 2
    assert notices == []
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    assert asks.slots(2) == 2
    assert notices == [
        "a Spark Connect session on a Databricks runtime means standard access mode as a rule, "
        "which runs Python functions in sandboxes that cannot start ranks. If this run fails for "
        "that reason: attach the notebook to classic compute with dedicated access mode and an ML "
        "runtime, or run on the driver with a negative np."
    ]
    serverless = r"^Databricks' serverless compute runs .* ranks\. Attach the notebook to classic"
    for name, version in (
        ("DATABRICKS_RUNTIME_VERSION", "client.2.5"),
        ("DATABRICKS_ENV_VERSION", "4"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, version)
            with pytest.raises(LaunchError, match=serverless):
                asks.slots(2)
    classic = launcher(Classic(CLUSTER), notices)
    assert classic.slots(2) == 2
    assert len(notices) == 1


def test_a_range_of_np_is_refused_on_spark_connect() -> None:
    dynamic = {**CLUSTER, "spark.dynamicAllocation.enabled": "True"}
    for settings, told in (
        (CLUSTER, "^a range of np needs"),
        (dynamic, "^spark.dynamicAllocation"),
    ):
        with pytest.raises(SlotError, match=told):
            launcher(Connected(settings)).check_pool(1)
