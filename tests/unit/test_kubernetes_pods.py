"""What a SlotError says about executor pods that do not run."""

from __future__ import annotations

from typing import Any

from horovod_runner.launchers.kubernetes_pods import describe

_NO_NODE = "0/2 nodes are available: 2 Insufficient memory. preemption: 0/2 nodes are available."


def pod(phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "digits-exec-1"}, "status": {"phase": phase, **status}}


def unscheduled() -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod("Pending", conditions=[{**condition, "message": _NO_NODE}])


def test_pods_without_a_node_are_counted_with_the_schedulers_reason() -> None:
    assert describe([unscheduled(), unscheduled(), pod("Running")]) == (
        "2 executor pods are pending: Unschedulable: 0/2 nodes are available: 2 Insufficient "
        "memory. preemption: 0/2 nodes are available."
    )


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    waiting = {"reason": "ErrImageNeverPull", "message": 'Container image "gone:1" is not present'}
    scheduled = {"type": "PodScheduled", "status": "True"}
    states = [{"state": {"waiting": waiting}}]
    assert describe([pod("Pending", conditions=[scheduled], containerStatuses=states)]) == (
        '1 executor pod is pending: ErrImageNeverPull: Container image "gone:1" is not present.'
    )


def test_a_pod_without_a_reason_is_pending_because_it_begins_or_has_ended() -> None:
    running = [{"state": {"running": {}}}]
    assert describe([pod("Pending", containerStatuses=running)]) == (
        "1 executor pod is pending: its container is being created."
    )
    assert describe([pod("Succeeded", containerStatuses=running), pod("Succeeded")]) == (
        "2 executor pods have ended: Succeeded."
    )
    assert describe(
        [pod("Failed", containerStatuses=[{"state": {"terminated": {"exitCode": 1}}}])]
    ) == ("1 executor pod has ended: Error, exit code 1.")


def test_pods_that_have_ended_are_named_with_their_end() -> None:
    ended = {"reason": "OOMKilled", "exitCode": 137}
    killed = pod("Failed", containerStatuses=[{"state": {"terminated": ended}}])
    evicted = pod("Failed", reason="Evicted", message="The node was low on resource: memory. ")
    assert describe([killed, evicted]) == (
        "1 executor pod has ended: OOMKilled, exit code 137. 1 executor pod has ended: Evicted: "
        "The node was low on resource: memory."
    )


def test_where_there_is_no_pod_the_place_of_the_reason_is_named() -> None:
    assert "ExecutorPodsAllocator" in describe([])


def test_pods_that_run_are_not_mentioned() -> None:
    assert describe([pod("Running")]) == ""


def test_a_pod_that_its_node_does_not_end_is_named_with_the_node() -> None:
    deleted = {**pod("Running"), "spec": {"nodeName": "node7"}}
    deleted["metadata"] = {"deletionTimestamp": "2026-11-29T18:00:00Z"}
    said = describe([deleted, pod("Running")])
    assert said.startswith("1 executor pod is to end, and node node7 has not done it yet")
    assert "kubectl delete pod --force" in said
