"""Stories on a real Kubernetes cluster, in pods as Pod Security "restricted" requires."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from horovod_runner import (
    ClusterConfig,
    HorovodRunner,
    RankFailedError,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    save_checkpoint,
)
from tests.contract.test_end import Calling
from tests.engines.kubernetes.checkout import Checkout
from tests.engines.kubernetes.cluster import ROOT, Cluster
from tests.places import classic_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("kubernetes"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def checkout() -> Iterator[Checkout]:
    """A cluster with a namespace whose pods run this checkout."""
    with tempfile.TemporaryDirectory(prefix="k8s-") as folder, Cluster(Path(folder)) as cluster:
        yield Checkout(cluster)


@pytest.fixture(scope="module")
def session(checkout: Checkout) -> Iterator[SparkSession]:
    """An application with two executors of one slot each; its driver is on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(checkout.cluster.kubeconfig))
        with classic_session(checkout.settings()) as session:
            yield session


def runner(session: SparkSession, **options: Any) -> HorovodRunner:
    cluster = ClusterConfig(spark=session, slot_timeout=300, preload_frameworks=False)
    return HorovodRunner(**{"np": 2, "cluster_config": cluster, "hang_timeout": 600, **options})


def look_around() -> list[dict[str, Any]]:
    """What each rank may do, and where it is."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    memory = os.statvfs("/dev/shm")
    found = {
        "sum": hvd.allreduce(torch.full((1_000_000,), float(hvd.rank() + 1)), op=hvd.Sum)[0].item(),
        "host": os.uname().nodename,
        "user": os.getuid(),
        "filter": status["Seccomp"],
        "capabilities": int(status["CapEff"], 16),
        "no new privileges": status["NoNewPrivs"],
        "shared memory": memory.f_blocks * memory.f_frsize,
    }
    return [*hvd.allgather_object(found)]


def test_ranks_in_pods_reduce_without_privileges(session: SparkSession) -> None:
    found = runner(session).run(look_around)
    assert len({rank.pop("host") for rank in found}) == 2
    assert (
        found
        == [
            {
                "sum": 3.0,
                "user": 185,
                "filter": "2",  # RuntimeDefault
                "capabilities": 0,
                "no new privileges": "1",
                "shared memory": 2**30,  # of docker/kubernetes/pod.yaml
            }
        ]
        * 2
    )


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such column")
    threading.Event().wait()


def test_an_exception_in_a_pod_is_raised_with_its_traceback(session: SparkSession) -> None:
    with pytest.raises(RankFailedError) as caught:
        runner(session).run(fail_on_rank_1)
    assert caught.value.rank == 1
    assert "ValueError: no such column" in str(caught.value)
    assert "fail_on_rank_1" in str(caught.value)


def take_all_memory() -> None:
    if os.environ["RANK"] == "1":
        taken = []
        while True:
            taken.append(bytearray(50_000_000))
    threading.Event().wait()


def test_a_rank_above_the_memory_limit_of_its_pod_is_named(session: SparkSession) -> None:
    with pytest.raises(RankFailedError) as caught:
        runner(session).run(take_all_memory)
    assert caught.value.rank == 1
    assert "memory" in str(caught.value)
    assert "spark.executor.memoryOverhead" in str(caught.value)


def wait_in_the_first_attempt() -> tuple[int, int]:
    """Save a checkpoint and wait for the end of a pod; the next attempt returns what it has."""
    loaded = load_checkpoint()
    if loaded is None:
        save_checkpoint({"weights": 7}, 1)
        log_to_driver(f"up {os.uname().nodename}")
        threading.Event().wait()
        raise AssertionError("the wait has no end")
    return loaded.state["weights"], current_attempt()


def evict(checkout: Checkout, pod: str) -> None:
    """Ask for the end of a pod as `kubectl drain` does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{checkout.namespace}/pods/{pod}/eviction"
    checkout.kubectl("create", f"--raw={path}", "--filename=-", given=json.dumps(eviction))


def test_a_run_resumes_from_its_checkpoint_after_the_eviction_of_a_pod(
    checkout: Checkout, session: SparkSession, tmp_path: Path
) -> None:
    shown = Calling("up ", 2, lambda: evict(checkout, shown.getvalue().split()[-1]))
    with contextlib.redirect_stdout(shown):
        resumed = runner(session, max_restarts=2, checkpoint_dir=str(tmp_path)).run(
            wait_in_the_first_attempt
        )
    assert resumed == (7, 2)


def test_pods_that_no_node_takes_are_named_with_kubernetes_reason(
    checkout: Checkout, tmp_path: Path
) -> None:
    said = submit(
        checkout,
        tmp_path,
        """
        from horovod_runner import ClusterConfig, HorovodRunner, SlotError
        try:
            HorovodRunner(np=2, cluster_config=ClusterConfig(slot_timeout=20)).run(int)
        except SlotError as error:
            print("refused:", error)
        """,
        executor_memory="900g",
    )
    assert "2 executor pods are pending: Unschedulable: 0/2 nodes are available" in said
    assert "Insufficient memory" in said


def submit(checkout: Checkout, folder: Path, script: str, **settings: str) -> str:
    """Run a script with an application of its own, in client mode; returns its output."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [str(Path(checkout.python).parent / "spark-submit")]
    for name, value in checkout.settings(**settings).items():
        command += ["--conf", f"{name}={value}"]
    environment = {
        **os.environ,
        "KUBECONFIG": str(checkout.cluster.kubeconfig),
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": checkout.python,
    }
    done = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
