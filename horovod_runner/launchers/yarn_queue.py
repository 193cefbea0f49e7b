"""Why YARN has not granted all executors, in the numbers of its queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod_runner.common.text import bytes_text, count_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MB = 1 << 20


@dataclass(frozen=True)
class Queue:
    """The queue of an application, and the cluster.

    Attributes:
        name: of the queue, with those above it.
        share, most: what of the cluster belongs to it, and what it may use at most, from 0 to 1.
        used: what it uses of its share: above 1 it has borrowed.
        waiting_mb: their memory, in MiB.
        free_mb: the free memory of each node, in MiB.
        diagnostics: what YARN says of the application; empty if that is nothing.
    """

    name: str
    share: float
    most: float
    used: float
    waiting: int
    waiting_mb: int
    nodes: int
    free_mb: tuple[int, ...]
    free_cores: int
    diagnostics: str = ""


def reason(spark: SparkSession) -> str:
    """Describe what keeps YARN from granting more executors, in some sentences."""
    return describe(_ask(spark))


def describe(queue: Queue) -> str:
    """Describe a queue that is short of something."""
    sentences = [
        f"YARN's queue {queue.name} uses {queue.used:.0%} of its share, which is "
        f"{queue.share:.0%} of the cluster (at most {queue.most:.0%})."
    ]
    if queue.waiting:
        sentences.append(
            f"{count_text(queue.waiting, 'container')} with {bytes_text(queue.waiting_mb * _MB)} "
            "of memory in all are waited for there."
        )
    if queue.nodes:
        largest = bytes_text(max(queue.free_mb) * _MB)
        sentences.append(
            f"The cluster's {count_text(queue.nodes, 'node')} have {queue.free_cores} free cores, "
            f"and at most {largest} of free memory on one."
        )
    else:
        sentences.append("No NodeManager of the cluster runs.")
    if queue.diagnostics:
        sentences.append(f"YARN says: {queue.diagnostics.rstrip('.')}.")
    return " ".join(sentences)


def _ask(spark: SparkSession) -> Queue:
    """Ask the ResourceManager, with the rights of the application's user."""
    context = spark.sparkContext
    yarn = context._jvm.org.apache.hadoop.yarn
    client = yarn.client.api.YarnClient.createYarnClient()
    client.init(yarn.conf.YarnConfiguration(context._jsc.hadoopConfiguration()))
    client.start()
    try:
        application = yarn.api.records.ApplicationId.fromString(context.applicationId)
        report = client.getApplicationReport(application)
        info = client.getQueueInfo(report.getQueue())
        statistics = info.getQueueStatistics()
        running = context._gateway.new_array(yarn.api.records.NodeState, 1)
        running[0] = yarn.api.records.NodeState.RUNNING
        nodes = list(client.getNodeReports(running))
        free = [(each.getCapability(), each.getUsed()) for each in nodes]
        return Queue(
            name=str(info.getQueuePath() or report.getQueue()),
            share=float(info.getCapacity()),
            most=float(info.getMaximumCapacity()),
            used=float(info.getCurrentCapacity()),
            waiting=int(statistics.getPendingContainers()),
            waiting_mb=int(statistics.getPendingMemoryMB()),
            nodes=len(nodes),
            free_mb=tuple(int(all_.getMemorySize() - used.getMemorySize()) for all_, used in free),
            free_cores=sum(
                int(all_.getVirtualCores() - used.getVirtualCores()) for all_, used in free
            ),
            diagnostics=str(report.getDiagnostics() or "").strip(),
        )
    finally:
        client.stop()
