"""Stories on a real Kubernetes cluster, in pods as Pod Security "restricted" requires."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
import yaml

from horovod_runner import HorovodRunner, RankFailedError
from horovod_runner.common.options import grouped
from tests.contract.test_end import Calling
from tests.engines import docker
from tests.engines.kubernetes.checkout import Checkout
from tests.engines.kubernetes.cluster import ROOT, Cluster
from tests.engines.kubernetes.network import NODES
from tests.engines.programs import wait_in_the_first_attempt
from tests.places import classic_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.places("kubernetes"), pytest.mark.timeout(900)]
MANIFESTS = ROOT / "docker" / "kubernetes"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
PROGRAMS = "tests/engines/kubernetes/programs.py"


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
        with classic_session(checkout.client_settings()) as session:
            yield session


def runner(session: SparkSession, **options: Any) -> HorovodRunner:
    given = {"spark": session, "slot_timeout": 300, "preload_frameworks": False}
    return HorovodRunner(np=2, **grouped({**given, "hang_timeout": 600, **options}))


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
    numbers = torch.full((1_000_000,), float(hvd.rank() + 1))
    found = {
        "sum": hvd.allreduce(numbers, op=hvd.Sum)[0].item(),
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
    without_privileges = {
        "sum": 3.0,
        "user": 185,
        "filter": "2",  # RuntimeDefault
        "capabilities": 0,
        "no new privileges": "1",
        "shared memory": 2**30,  # of docker/kubernetes/pod.yaml
    }
    assert found == [without_privileges, without_privileges]


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such column")
    threading.Event().wait()


def test_an_exception_in_a_pod_is_raised_with_its_traceback(session: SparkSession) -> None:
    with pytest.raises(ValueError, match="no such column") as caught:
        runner(session).run(fail_on_rank_1)
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert caught.value.__cause__.rank == 1
    assert "in fail_on_rank_1" in str(caught.value.__cause__)


def take_all_memory() -> None:
    if os.environ["RANK"] == "1":
        taken = []
        while True:
            taken.append(bytes(range(250)) * 200_000)
    threading.Event().wait()


def test_a_rank_above_the_memory_limit_of_its_pod_is_named(session: SparkSession) -> None:
    with pytest.raises(RankFailedError) as caught:
        runner(session).run(take_all_memory)
    assert caught.value.rank == 1
    assert "memory" in str(caught.value)
    assert "spark.executor.memoryOverhead" in str(caught.value)


def test_a_run_resumes_from_its_checkpoint_after_the_eviction_of_a_pod(
    checkout: Checkout, session: SparkSession, tmp_path: Path
) -> None:
    shown = Calling("up ", 2, lambda: checkout.evict(shown.getvalue().split()[-1]))
    with contextlib.redirect_stdout(shown):
        resumed = runner(session, max_restarts=2, checkpoint_dir=str(tmp_path)).run(
            wait_in_the_first_attempt
        )
    assert resumed == (7, 2)


def test_a_run_outlives_a_node_that_is_not_ready_and_resumes_when_it_is_lost(
    checkout: Checkout, session: SparkSession, tmp_path: Path
) -> None:
    nodes: list[str] = []

    def lose_node() -> None:
        pod = shown.getvalue().split()[-1]
        node = checkout.kubectl("get", "pod", pod, "--output=jsonpath={.spec.nodeName}")
        nodes.append(node)
        checkout.cluster.kubelet(node).suspend()
        ready = "--for=condition=Ready=Unknown"
        checkout.cluster.kubectl("wait", ready, f"node/{node}", "--timeout=200s")
        # Kubernetes wants the pod to end now, and nobody on the node does that: the ranks go on.
        checkout.kubectl("wait", "--for=jsonpath={.metadata.deletionTimestamp}", f"pod/{pod}")
        assert "was lost" not in shown.getvalue()
        checkout.cluster.end_pods(node)
        # What an administrator does about a machine that does not come back.
        checkout.cluster.kubectl("taint", "node", node, OUT_OF_SERVICE)

    shown = Calling("up ", 2, lose_node)
    try:
        with contextlib.redirect_stdout(shown):
            resumed = runner(session, max_restarts=2, checkpoint_dir=str(tmp_path)).run(
                wait_in_the_first_attempt
            )
    finally:
        for node in nodes:
            checkout.cluster.kubelet(node).resume()
            checkout.cluster.kubectl("taint", "node", node, f"{OUT_OF_SERVICE}-")
    assert resumed[0] == 7
    assert resumed[1] > 1
    (node,) = nodes
    checkout.cluster.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=200s")


def test_an_elastic_run_under_dynamic_allocation_outlives_a_deleted_pod(
    checkout: Checkout, tmp_path: Path
) -> None:
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.executor.instances": "0",
    }
    with client_mode(checkout, tmp_path, PROGRAMS, "grow", **settings) as driver:
        pods = [line.split()[-1] for line in lines_with(driver, "up ", 2)]
        checkout.kubectl("delete", "pod", pods[-1], "--force", "--grace-period=0")
        (last,) = lines_with(driver, "ranks: from", 1)
    assert re.search(r"ranks: from 2 to 2 in [2-4] attempts", last)


def test_no_step_is_lost_when_a_pod_is_evicted_from_an_executor_that_is_told(
    checkout: Checkout, tmp_path: Path
) -> None:
    settings = {"spark.decommission.enabled": "true"}
    with client_mode(checkout, tmp_path, PROGRAMS, "grow", **settings) as driver:
        pods = [line.split()[-1] for line in lines_with(driver, "up ", 2)]
        checkout.evict(pods[-1])
        (ends,) = lines_with(driver, "ends:", 1)
    assert ends == "ends: from 2 to 1 ranks; from 1 to 2 ranks; finished"


def test_pods_that_no_node_takes_are_named_with_kubernetes_reason(
    checkout: Checkout, tmp_path: Path
) -> None:
    settings = {"spark.executor.memory": "900g"}
    with client_mode(checkout, tmp_path, PROGRAMS, "refused", **settings) as driver:
        (refused,) = lines_with(driver, "refused:", 1)
    assert "2 executor pods are pending: Unschedulable: 0/2 nodes are available" in refused
    assert "2 Insufficient memory" in refused


def test_digits_are_learned_in_cluster_mode(checkout: Checkout, tmp_path: Path) -> None:
    with cluster_mode(
        checkout, tmp_path, "examples/digits_torch.py", "--np=2", "--epochs=8"
    ) as driver:
        (accuracy,) = lines_with(driver, "accuracy on 360 held-out digits", 1)
    assert re.search(r"digits: 9\d\.\d%", accuracy)


def test_a_run_in_cluster_mode_resumes_from_a_store_in_the_cluster(
    checkout: Checkout, tmp_path: Path
) -> None:
    command = [checkout.python, "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000"]
    service = {"selector": {"pod": "store"}, "ports": [{"port": 9000}]}
    metadata = {"name": "store", "namespace": checkout.namespace}
    checkout.cluster.apply(
        checkout.pod("store", command),
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
    )
    variables = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}
    variables |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": "http://store:9000"}
    settings = {f"spark.kubernetes.driverEnv.{name}": each for name, each in variables.items()}
    settings |= {f"spark.executorEnv.{name}": each for name, each in variables.items()}
    with cluster_mode(checkout, tmp_path, PROGRAMS, "resume", **settings) as driver:
        pods = [line.split()[-1] for line in lines_with(driver, "up ", 2)]
        checkout.evict(pods[-1])
        (resumed,) = lines_with(driver, "resumed", 1)
    assert "resumed (7, 2)" in resumed


def test_a_notebook_in_a_pod_has_executors_in_pods(checkout: Checkout) -> None:
    checkout.kubectl(
        "create", "configmap", "pod-template", f"--from-file=pod.yaml={checkout.template}"
    )
    settings, service, pod = yaml.safe_load_all((MANIFESTS / "notebook.yaml").read_text())
    text = settings["data"]["spark-defaults.conf"]
    small = {name: value for name, value in checkout.settings().items() if "instances" not in name}
    lines = [f"{name} {value}" for name, value in small.items()]
    settings["data"]["spark-defaults.conf"] = "\n".join([text, *lines])
    (container,) = pod["spec"]["containers"]
    here = checkout.pod("notebook", ["sleep", "infinity"], SPARK_CONF_DIR="/opt/spark/conf")
    (ours,) = here["spec"]["containers"]
    container |= {name: ours[name] for name in ("image", "imagePullPolicy", "args", "env")}
    container["volumeMounts"] += ours["volumeMounts"]
    pod["spec"]["volumes"] += here["spec"]["volumes"]
    pod["spec"]["securityContext"] = here["spec"]["securityContext"]
    listed = "\n---\n".join(map(json.dumps, (settings, service, pod)))
    checkout.kubectl("apply", "--filename=-", given=listed)
    checkout.kubectl("wait", "--for=condition=Ready", "pod/notebook", "--timeout=300s")
    program = [checkout.python, f"{ROOT}/{PROGRAMS}", "count"]
    said = checkout.kubectl("exec", "notebook", "--", *program)
    checkout.kubectl("delete", "pod", "notebook", "--wait=false")
    assert "ranks 2" in said


@pytest.fixture(scope="module")
def product(checkout: Checkout) -> str:
    """The image of docker/cpu.Dockerfile, on the first node."""
    archive = checkout.cluster.folder / "product.archive"
    with docker.running() as engine:
        image = docker.digits_image(engine)
        saved = engine("save", f"--output={archive}", image)
        assert saved.returncode == 0, saved.stderr
    checkout.cluster.load(archive, NODES[:1])
    archive.unlink()
    return f"docker.io/library/{image}"


@pytest.mark.timeout(3000)  # the first build of the image takes longer than any test
def test_the_products_image_is_all_that_pods_need(
    checkout: Checkout, product: str, tmp_path: Path
) -> None:
    checkout.kubectl(
        "create", "configmap", "scripts", f"--from-file={ROOT}/examples/digits_torch.py"
    )
    template = yaml.safe_load((MANIFESTS / "pod.yaml").read_text())
    template["spec"]["volumes"].append({"name": "scripts", "configMap": {"name": "scripts"}})
    (container,) = template["spec"]["containers"]
    container["volumeMounts"].append({"name": "scripts", "mountPath": "/scripts"})
    (tmp_path / "pod.json").write_text(json.dumps(template))
    settings = {
        "spark.kubernetes.container.image": product,
        "spark.pyspark.python": "python",  # otherwise the one of this machine's spark-submit
        "spark.kubernetes.driver.podTemplateFile": f"{tmp_path}/pod.json",
        "spark.kubernetes.executor.podTemplateFile": f"{tmp_path}/pod.json",
        "spark.kubernetes.node.selector.kubernetes.io/hostname": NODES[0],
    }
    arguments = ("/scripts/digits_torch.py", "--np=2", "--epochs=8")
    with cluster_mode(checkout, tmp_path, *arguments, **settings) as driver:
        (accuracy,) = lines_with(driver, "accuracy on 360 held-out digits", 1)
    assert re.search(r"digits: 9\d\.\d%", accuracy)


def test_the_network_policy_is_accepted(checkout: Checkout) -> None:
    # The plugins of this cluster enforce none: docs/where/kubernetes.md says so.
    checkout.kubectl("apply", f"--filename={MANIFESTS}/network-policy.yaml")
    selected = "--output=jsonpath={.spec.podSelector.matchLabels.app}"
    assert (
        checkout.kubectl("get", "networkpolicy", "horovod-runner", selected)
        == (json.loads(checkout.template.read_text())["metadata"]["labels"]["app"])
    )


@contextmanager
def client_mode(
    checkout: Checkout, folder: Path, script: str, *arguments: str, **settings: str
) -> Iterator[IO[str]]:
    """Submit a script whose driver is on this machine; yields its output."""
    command = checkout.submit({**checkout.client_settings(), **settings})
    with process(checkout, [*command, f"{ROOT / script}", *arguments], folder) as output:
        yield output


@contextmanager
def cluster_mode(
    checkout: Checkout, folder: Path, script: str, *arguments: str, **settings: str
) -> Iterator[IO[str]]:
    """Submit a script whose driver is a pod; yields the pod's log. The driver has to succeed."""
    name = "driver"
    command = checkout.submit({**checkout.cluster_settings(name), **settings})
    command += ["--deploy-mode", "cluster", f"local://{ROOT / script}", *arguments]
    follow = [*checkout.kubectl_line, "logs", "--follow", name]
    try:
        with process(checkout, command, folder):
            checkout.kubectl("wait", "--for=create", f"pod/{name}", "--timeout=200s")
            checkout.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=200s")
            with process(checkout, follow, folder) as log:
                yield log
            succeeded = "--for=jsonpath={.status.phase}=Succeeded"
            checkout.kubectl("wait", succeeded, f"pod/{name}", "--timeout=200s")
    finally:
        checkout.kubectl("delete", "pod", name, "--ignore-not-found")


@contextmanager
def process(checkout: Checkout, command: list[str], folder: Path) -> Iterator[IO[str]]:
    """Run a command; yields its output, and ends it."""
    environment = {**os.environ, **checkout.environment}
    with (
        (folder / "errors.log").open("a") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as started,
    ):
        assert started.stdout is not None
        try:
            yield started.stdout
        except AssertionError as error:
            error.add_note((folder / "errors.log").read_text()[-5000:])
            raise
        finally:
            started.terminate()


def lines_with(output: IO[str], text: str, count: int) -> list[str]:
    """Read lines until so many have a text; returns those."""
    read: list[str] = []
    found: list[str] = []
    for line in output:
        read.append(line)
        if text in line:
            found.append(line.strip())
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} lines with {text!r} in:\n{''.join(read)}")
