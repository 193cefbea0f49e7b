"""Pods that run this checkout with this environment, under Pod Security "restricted".

They mount both, so their image is an almost empty one. Its entry point is the product's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyspark
import yaml

from tests.engines.kubernetes.cluster import ROOT, Cluster
from tests.engines.kubernetes.image import write_image
from tests.engines.kubernetes.network import MACHINE

IMAGE = "localhost/checkout:1"
NAMESPACE = "stories"
_USER = 185
_ETC = ("alternatives", "java-*-openjdk", "ld.so.cache", "nsswitch.conf", "ssl")


class Checkout:
    """A namespace for pods of this checkout.

    Attributes:
        cluster: has the namespace.
        namespace: its name.
        template: the file of the template for executors' and drivers' pods.
        python: the interpreter, in pods and on this machine.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.namespace = NAMESPACE
        self.python = str(Path(sys.prefix) / "bin" / "python")
        self.template = cluster.folder / "template.json"
        self._start_namespace()
        cluster.load(self._write_image())
        volumes, mounts = cluster.share(NAMESPACE, _folders())
        self.template.write_text(json.dumps(_template(volumes, mounts)))

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """Run kubectl in the namespace."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", *words, given=given)

    def evict(self, pod: str) -> None:
        """Ask for the end of a pod as `kubectl drain` does."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        self.kubectl("create", f"--raw={path}", "--filename=-", given=json.dumps(eviction))

    def settings(self) -> dict[str, str]:
        """Spark's settings for executors of this checkout."""
        return {
            "spark.kubernetes.namespace": NAMESPACE,
            "spark.kubernetes.container.image": IMAGE,
            "spark.kubernetes.container.image.pullPolicy": "Never",
            "spark.kubernetes.executor.request.cores": "0.1",
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "600m",
            "spark.executor.memoryOverhead": "1400m",
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            # Executors live for a minute: compiling their Java well would take most of it.
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }

    def client_settings(self) -> dict[str, str]:
        """Spark's settings for an application whose driver is on this machine."""
        return {
            **self.settings(),
            "spark.master": f"k8s://{self.cluster.url}",
            "spark.driver.host": MACHINE,
            "spark.driver.bindAddress": MACHINE,
            "spark.kubernetes.executor.podTemplateFile": str(self.template),
        }

    def cluster_settings(self, name: str) -> dict[str, str]:
        """Spark's settings for an application whose driver is a pod."""
        return {
            **self.settings(),
            "spark.master": f"k8s://{self.cluster.url}",
            "spark.kubernetes.driver.pod.name": name,
            "spark.kubernetes.authenticate.driver.serviceAccountName": "spark",
            "spark.kubernetes.driver.podTemplateFile": str(self.template),
            "spark.kubernetes.executor.podTemplateFile": str(self.template),
            "spark.kubernetes.driver.request.cores": "0.1",
            "spark.kubernetes.driverEnv.PYTHONPATH": str(ROOT),
            "spark.driver.memory": "600m",
            "spark.driver.memoryOverhead": "1000m",
        }

    def submit(self, settings: Mapping[str, str]) -> list[str]:
        """The command line of spark-submit with these settings."""
        listed = [f"--conf={name}={value}" for name, value in settings.items()]
        return [str(Path(self.python).parent / "spark-submit"), *listed]

    @property
    def environment(self) -> dict[str, str]:
        """What spark-submit needs on this machine."""
        return {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": self.python,
        }

    @property
    def kubectl_line(self) -> list[str]:
        """The command line of kubectl in the namespace."""
        return [*self.cluster.kubectl_line, f"--namespace={NAMESPACE}"]

    def pod(self, name: str, command: list[str], **environment: str) -> dict[str, Any]:
        """A pod of this checkout that runs a command."""
        pod: dict[str, Any] = json.loads(self.template.read_text())
        pod["metadata"] = {"name": name, "namespace": NAMESPACE, "labels": {"pod": name}}
        pod["spec"]["restartPolicy"] = "Never"
        (container,) = pod["spec"]["containers"]
        variables = {"PYTHONPATH": str(ROOT), **environment}
        container |= {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "args": command}
        # Of the class "Guaranteed": a machine without memory ends other processes first.
        amounts = {"cpu": "1", "memory": "1Gi"}
        container["resources"] = {"limits": amounts, "requests": amounts}
        container["env"] = [{"name": key, "value": value} for key, value in variables.items()]
        return pod

    def _start_namespace(self) -> None:
        level = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": NAMESPACE, "labels": level}
        self.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.kubectl("apply", f"--filename={ROOT}/docker/kubernetes/driver.yaml")

    def _write_image(self) -> Path:
        root = self.cluster.folder / "checkout"
        for name in ("bin", "lib", "lib64", "sbin"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).symlink_to(f"usr/{name}")
        (root / "usr").mkdir()
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        (root / "opt").mkdir()
        for script in ("entrypoint.sh", "decom.sh"):
            shutil.copy(ROOT / "docker" / script, root / "opt")
        (root / "etc").mkdir()
        for pattern in _ETC:
            for found in Path("/etc").glob(pattern):
                if found.is_dir():
                    shutil.copytree(found, root / "etc" / found.name, symlinks=True)
                else:
                    shutil.copy(found, root / "etc" / found.name)
        (root / "etc" / "passwd").write_text(
            f"root:x:0:0::/root:/bin/sh\nspark:x:{_USER}:{_USER}::/tmp:/bin/sh\n"
        )
        (root / "etc" / "group").write_text(f"root:x:0:\nspark:x:{_USER}:\n")
        java = Path(os.environ.get("REAL_JAVA") or shutil.which("java") or "java").resolve()
        environment = {
            "JAVA_HOME": str(java.parents[1]),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "PYSPARK_PYTHON": self.python,
        }
        entry = ["/usr/bin/tini", "--", "/opt/entrypoint.sh"]
        archive = self.cluster.folder / "checkout.archive"
        return write_image(archive, IMAGE, root, entry, environment)


def _folders() -> list[Path]:
    """What pods mount: this checkout, the environment, its Python and this machine's programs."""
    wanted = {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), Path("/usr")}
    return sorted(each for each in wanted if not wanted & {*each.parents})


def _template(volumes: list[Any], mounts: list[Any]) -> dict[str, Any]:
    """The product's template, with the shared folders and a user: the image names none."""
    template: dict[str, Any] = yaml.safe_load((ROOT / "docker/kubernetes/pod.yaml").read_text())
    spec = template["spec"]
    spec["securityContext"] |= {"runAsUser": _USER, "runAsGroup": _USER}
    spec["volumes"] += volumes
    spec["containers"][0]["volumeMounts"] += mounts
    return template
