"""Why executor pods do not run, in Kubernetes' words.

Spark asks for pods and hears of those that run. What keeps the others is in their status only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from horovod_runner.common.spark_session import conf_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MESSAGE = 400  # characters of a reason


def reason(spark: SparkSession) -> str:
    """Describe the executor pods of this application that do not run, in a sentence or two."""
    return describe(_executor_pods(spark))


def describe(pods: Iterable[Mapping[str, Any]]) -> str:
    """Describe the executor pods that do not run, given all as the API server returns them."""
    pods = list(pods)
    if not pods:
        return (
            "Kubernetes has no executor pod of this application: it refused to create them (a "
            "quota, Pod Security, a missing role), or they have ended. The driver's log names the "
            "reason: look for ExecutorPodsAllocator."
        )
    reasons = Counter(
        _reason(pod) for pod in pods if _phase(pod) == "Pending" and not _is_leaving(pod)
    )
    leaving = Counter(_node(pod) for pod in pods if _is_leaving(pod))
    ended = Counter(_end(pod) for pod in pods if _phase(pod) in {"Failed", "Succeeded"})
    sentences = [
        f"{_pods(count, 'is', 'are')} pending: {reason}." for reason, count in reasons.items()
    ]
    sentences += [
        f"{_pods(count, 'has', 'have')} ended: {reason}." for reason, count in ended.items()
    ]
    sentences += [
        f"{_pods(count, 'is', 'are')} to end, and node {node} has not done it yet: Spark asks for "
        "another pod after that. If the machine is gone, `kubectl delete pod --force` tells "
        "Kubernetes."
        for node, count in leaving.items()
    ]
    return " ".join(sentences)


def _executor_pods(spark: SparkSession) -> list[Mapping[str, Any]]:
    """The executor pods, by the client and with the rights of Spark's scheduler."""
    context = spark.sparkContext
    client = context._jsc.sc().schedulerBackend().kubernetesClient()
    namespace = conf_of(spark, "spark.kubernetes.namespace") or "default"
    pods = client.pods().inNamespace(namespace)
    pods = pods.withLabel("spark-app-selector", context.applicationId)
    pods = pods.withLabel("spark-role", "executor").list()
    serialization = context._jvm.io.fabric8.kubernetes.client.utils.Serialization
    listed: list[Mapping[str, Any]] = json.loads(serialization.asJson(pods))["items"]
    return listed


def _is_leaving(pod: Mapping[str, Any]) -> bool:
    """Whether a pod was deleted and has not ended: its node may no longer answer."""
    is_there = _phase(pod) in {"Pending", "Running"}
    return is_there and "deletionTimestamp" in pod.get("metadata", {})


def _node(pod: Mapping[str, Any]) -> str:
    return str(pod.get("spec", {}).get("nodeName", ""))


def _phase(pod: Mapping[str, Any]) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _pods(count: int, one: str, several: str) -> str:
    return f"1 executor pod {one}" if count == 1 else f"{count} executor pods {several}"


def _reason(pod: Mapping[str, Any]) -> str:
    """Why a pod is pending: no node takes it, or its container cannot be made."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _sentence(condition)
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            return _sentence(waiting)
    return "its container is being created"


def _end(pod: Mapping[str, Any]) -> str:
    status = pod.get("status", {})
    if "reason" in status:
        return _sentence(status)
    for container in status.get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if ended:
            return f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}"
    return _phase(pod)


def _sentence(status: Mapping[str, Any]) -> str:
    reason, message = str(status.get("reason", "")), str(status.get("message", ""))
    text = f"{reason}: {message}" if message else reason
    return shorten(text, _MESSAGE).rstrip(".")
