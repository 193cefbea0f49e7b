"""Executors that an application has asked for, and why they do not come."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from horovod_runner import Limits, SlotError
from horovod_runner.launchers import engine, spark, yarn_queue
from horovod_runner.launchers.growth import Asked, asked_of, driver_logs, is_on_its_way
from horovod_runner.launchers.spark import SparkLauncher
from horovod_runner.launchers.yarn_queue import Queue
from tests.unit.test_connect import Classic

YARN = {"spark.master": "yarn"}
DYNAMIC = {**YARN, "spark.dynamicAllocation.enabled": "true"}
INSTANCES, BOUND = "spark.executor.instances", "spark.dynamicAllocation.maxExecutors"


@pytest.mark.parametrize(
    ("conf", "asked"),
    [
        (YARN, Asked(2, 1, INSTANCES)),  # the default of both engines
        ({"spark.master": "k8s://https://host:6443", INSTANCES: "5"}, Asked(5, 1, INSTANCES)),
        ({**YARN, "spark.executor.cores": "8", "spark.task.cpus": "3"}, Asked(2, 2, INSTANCES)),
        (
            {
                **YARN,
                "spark.executor.cores": "8",
                "spark.executor.resource.gpu.amount": "4",
                "spark.task.resource.gpu.amount": "1",
            },
            Asked(2, 4, INSTANCES),
        ),
        ({**DYNAMIC, BOUND: "3"}, Asked(3, 1, BOUND)),
        (DYNAMIC, None),
        ({"spark.master": "spark://host:7077", INSTANCES: "5"}, None),
        ({"spark.master": "local[4]"}, None),
    ],
)
def test_what_was_asked_of_an_engine_is_known_from_the_settings(
    conf: dict[str, str], asked: Asked | None
) -> None:
    assert asked_of(conf.get, {}) == asked


@pytest.mark.parametrize(
    ("requests", "tasks"),
    [
        ({"cpus": 4.0}, 2),
        ({"gpu": 0.5}, 6),
        ({"gpu": 0.4}, 6),
        ({"cpus": 2.0, "gpu": 2.0}, 1),
        ({}, 3),
    ],
)
def test_a_profile_says_what_a_task_takes(requests: dict[str, float], tasks: int) -> None:
    gpus = "spark.{}.resource.gpu.amount"
    conf = {**YARN, "spark.executor.cores": "8", gpus.format("executor"): "3"}
    conf |= {gpus.format("task"): "1", INSTANCES: "5"}
    asked = asked_of(conf.get, requests)
    assert asked == Asked(5, tasks, INSTANCES)
    assert asked.slots == 5 * tasks


@pytest.mark.parametrize(
    ("conf", "logs"),
    [
        ({**YARN, "spark.submit.deployMode": "cluster"}, "yarn logs -applicationId app-1"),
        ({**YARN, "spark.submit.deployMode": "client"}, ""),
        ({"spark.master": "spark://a:7077", "spark.submit.deployMode": "cluster"}, ""),
        ({"spark.kubernetes.submitInDriver": "true"}, "kubectl logs POD"),
        (
            {
                "spark.kubernetes.submitInDriver": "True",
                "spark.kubernetes.driver.pod.name": "train-driver",
            },
            "kubectl logs train-driver",
        ),
        ({}, ""),
    ],
)
def test_the_output_of_a_driver_on_the_cluster_is_read_by_a_command(
    conf: dict[str, str], logs: str
) -> None:
    assert driver_logs({"spark.app.id": "app-1", **conf}.get) == logs


@pytest.mark.parametrize(
    ("executors", "size", "comes"),
    [(1, 4, True), (0, 1, True), (1, 0, True), (None, 4, True), (2, 4, False), (1, 5, False)],
)
def test_slots_are_on_their_way_while_executors_are_missing_that_would_be_enough(
    executors: int | None, size: int, comes: bool
) -> None:
    assert is_on_its_way(Asked(2, 2, INSTANCES), executors, size) is comes
    assert not is_on_its_way(None, executors, size)


class Granting:
    """A session on YARN whose executors come one by one, each time that somebody looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, granted: int, **conf: str) -> None:
        self.seen = 0
        self.notices: list[str] = []
        given = {**YARN, **{name.replace("_", "."): value for name, value in conf.items()}}
        self.session: Any = Classic(given)

        def executors(_: object) -> int:
            return min(self.seen, granted)

        def slots(*_: object) -> int:
            self.seen += 1
            return executors(None)

        monkeypatch.setattr(engine, "count_executors", executors)
        monkeypatch.setattr(engine, "why_missing", lambda _: "The queue is full.")
        # No argument: what Spark tells cannot be given to a launcher.
        monkeypatch.setattr(spark, "_count_slots", slots)

    def launcher(self, **limits: float) -> SparkLauncher:
        return SparkLauncher(
            self.session, None, self.notices.append, threading.Event(), limits=Limits(**limits)
        )


def test_the_run_begins_with_the_last_executor_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    granting = Granting(monkeypatch, 3, spark_executor_instances="3")
    assert granting.launcher(slot_notice=0.001).slots(3) == 3
    assert "waiting for slots: 2 of 3. 2 of 3 executors run. The queue is full." in granting.notices


def test_all_slots_are_those_of_all_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    granting = Granting(monkeypatch, 3, spark_executor_instances="3")
    assert granting.launcher().slots(0) == 3


def test_the_end_of_the_wait_says_what_the_engine_said(monkeypatch: pytest.MonkeyPatch) -> None:
    granting = Granting(monkeypatch, 1, spark_executor_instances="2")
    asked = r"has 1 after \d s\. The session has spark\.executor\.instances=2 with 1 slot on each"
    with pytest.raises(SlotError, match=f"{asked} executor. 1 of 2 executors run. The queue is"):
        granting.launcher(granted_executors=0.5, slot_notice=0.001).slots(2)
    # What does not change is said once.
    assert len(granting.notices) == len({*granting.notices})


def test_slots_that_nobody_asked_for_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    granting = Granting(monkeypatch, 1, spark_executor_instances="2")
    with pytest.raises(SlotError, match=r"spark\.executor\.instances=2 with 1 slot"):
        granting.launcher(granted_executors=3600).slots(3)


def test_a_bound_of_dynamic_allocation_below_the_least_number_of_ranks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    granting = Granting(
        monkeypatch,
        0,
        spark_dynamicAllocation_enabled="true",
        spark_dynamicAllocation_maxExecutors="2",
    )
    launcher = granting.launcher()
    launcher.check_pool(2)
    assert launcher.expected_tasks() == 2
    with pytest.raises(SlotError, match=r"never has more than 2: .*maxExecutors=2"):
        launcher.check_pool(3)


def test_all_slots_are_refused_under_dynamic_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Granting(monkeypatch, 0, spark_dynamicAllocation_enabled="true").launcher()
    launcher.check_pool(1)
    with pytest.raises(SlotError, match=r"^np=0, .*dynamicAllocation\.enabled.* give np as"):
        launcher.check_pool(0)


def test_a_queue_is_described_with_its_share_and_what_is_free() -> None:
    queue = Queue(
        name="root.small",
        share=0.1,
        most=0.2,
        used=1.75,
        waiting=1,
        waiting_mb=2560,
        nodes=2,
        free_mb=(4096, 512),
        free_cores=7,
    )
    assert yarn_queue.describe(queue) == (
        "YARN's queue root.small uses 175% of its share, which is 10% of the cluster (at most "
        "20%). 1 container with 2.7 GB of memory in all are waited for there. The cluster's 2 "
        "nodes have 7 free cores, and at most 4.3 GB of free memory on one."
    )
    assert "No NodeManager of the cluster runs." in yarn_queue.describe(
        Queue("root.a", 1.0, 1.0, 0.0, 0, 0, 0, (), 0)
    )
