"""Executors that an application has asked of YARN or Kubernetes, which grant one by one. Pure.

Spark begins with 80% of them, or after 30 seconds. A standalone cluster grants at once what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from horovod_runner.common.slots import ranks_per_gpu
from horovod_runner.common.text import count_text

_DEFAULT_INSTANCES: Final = "2"  # of both engines
_BOUND, _INSTANCES = "spark.dynamicAllocation.maxExecutors", "spark.executor.instances"
_UNLIMITED: Final = 2**31 - 1


@dataclass(frozen=True)
class Asked:
    """The executors that an application has asked for.

    Attributes:
        executors: their number, or the most under dynamic allocation.
    """

    executors: int
    tasks: int
    setting: str

    @property
    def slots(self) -> int:
        """The slots of all executors."""
        return self.executors * self.tasks

    def __str__(self) -> str:
        slots = count_text(self.tasks, "slot")
        return f"{self.setting}={self.executors} with {slots} on each executor"


def asked_of(conf: Callable[[str], str | None], requests: Mapping[str, float]) -> Asked | None:
    """Read from the settings which executors an application has asked for.

    None if the engine grants executors at once, or under dynamic allocation without a bound. The
    requests are amounts of resources that a task takes, where they differ from the settings.
    """
    master = conf("spark.master") or ""
    if master != "yarn" and not master.startswith("k8s://"):
        return None
    tasks = _tasks(conf, requests)
    if (conf("spark.dynamicAllocation.enabled") or "").lower() == "true":
        most = int(conf(_BOUND) or _UNLIMITED)
        return Asked(most, tasks, _BOUND) if most < _UNLIMITED else None
    return Asked(int(conf(_INSTANCES) or _DEFAULT_INSTANCES), tasks, _INSTANCES)


def _tasks(conf: Callable[[str], str | None], requests: Mapping[str, float]) -> int:
    cores = int(conf("spark.executor.cores") or 1)
    tasks = int(cores // (requests.get("cpus") or float(conf("spark.task.cpus") or 1)))
    gpus = requests.get("gpu") or float(conf("spark.task.resource.gpu.amount") or 0)
    if gpus:
        given = float(conf("spark.executor.resource.gpu.amount") or 0)
        tasks = min(tasks, int(given * ranks_per_gpu(gpus) / math.ceil(gpus)))
    return tasks


def is_on_its_way(asked: Asked | None, executors: int | None, size: int) -> bool:
    """Whether missing slots will come with executors that have been asked for.

    ``executors`` run now; None if that is not known. ``size`` slots are needed; 0 for all.
    """
    if asked is None or size > asked.slots:
        return False
    return executors is None or executors < asked.executors


def driver_logs(conf: Callable[[str], str | None]) -> str:
    """How to read the output of a driver in cluster mode; empty for another driver."""
    if conf("spark.master") == "yarn" and conf("spark.submit.deployMode") == "cluster":
        return f"yarn logs -applicationId {conf('spark.app.id')}"
    if (conf("spark.kubernetes.submitInDriver") or "").lower() == "true":
        return f"kubectl logs {conf('spark.kubernetes.driver.pod.name') or 'POD'}"
    return ""
