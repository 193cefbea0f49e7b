"""Ranks, slots and GPUs: pure arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner import GpuError, LaunchError
from horovod_runner.common.slots import Offer
from horovod_runner.common.text import ranks_text
from horovod_runner.driver.placement import assign, describe, short_of_ports


def offer(task: int, host: str = "a", **fields: Any) -> Offer:
    fields = {"hostname": f"host-{host}", "address": f"10.0.0.{ord(host[0])}", **fields}
    return Offer(task, host, interface="eth0", **fields)


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40), st.randoms())
def test_every_task_gets_one_rank_and_hosts_stay_together(hosts: list[str], random: object) -> None:
    offers = [offer(task, host) for task, host in enumerate(hosts)]
    random.shuffle(offers)  # type: ignore[attr-defined]
    slots = assign(offers)
    assert [slot.rank for slot in slots] == list(range(len(hosts)))
    assert sorted(slot.task for slot in slots) == list(range(len(hosts)))
    assert slots[0].task == 0
    assert {slot.task: slot.host for slot in slots} == dict(enumerate(hosts))
    order = [slot.host for slot in slots]
    assert order == sorted(order, key=order.index)
    for slot in slots:
        local = [other for other in slots if other.host == slot.host]
        assert (slot.local_size, slot.local_rank) == (len(local), local.index(slot))
        # Horovod's cross communicator: the ranks of the same local_rank, in order.
        cross = [other for other in slots if other.local_rank == slot.local_rank]
        assert (slot.cross_size, slot.cross_rank) == (len(cross), cross.index(slot))


def test_gpus_are_dealt_by_local_rank_where_spark_gives_none() -> None:
    slots = assign(offer(task, host_gpus=("3", "5", "7")) for task in range(2))
    assert [slot.gpus for slot in slots] == [("3",), ("5",)]
    assert slots[0].host_gpus == slots[1].host_gpus == ("3", "5")


def test_sparks_gpus_are_kept_and_shown_in_local_rank_order() -> None:
    slots = assign([offer(0, task_gpus=("1",)), offer(1, task_gpus=("0",))])
    assert [slot.gpus for slot in slots] == [("1",), ("0",)]
    assert slots[0].host_gpus == ("1", "0")


def test_of_several_gpus_a_rank_the_first_ones_come_first() -> None:
    slots = assign([offer(task, host_gpus=("0", "1", "2", "3")) for task in range(2)], 2)
    assert [slot.gpus for slot in slots] == [("0", "1"), ("2", "3")]
    assert slots[0].host_gpus == ("0", "2", "1", "3")


def test_ranks_share_a_gpu_only_when_asked() -> None:
    offers = [offer(task, host_gpus=("0",)) for task in range(2)]
    with pytest.raises(GpuError, match=r"host-a .* 1 GPU.* 2 ranks .* 2 .*gpus_per_rank=1\b"):
        assign(offers)
    assert [slot.gpus for slot in assign(offers, 0.5)] == [("0",), ("0",)]


def test_one_gpu_given_to_two_tasks_is_refused_unless_shared() -> None:
    offers = [offer(task, task_gpus=("0",)) for task in range(2)]
    with pytest.raises(GpuError, match=r"tasks 0 and 1 .*host-a .*GPU 0\b"):
        assign(offers)
    assert len(assign(offers, 0.5)) == 2


def test_zero_hides_all_gpus() -> None:
    (slot,) = assign([offer(0, task_gpus=("0",))], 0)
    assert slot.gpus == slot.host_gpus == ()


def test_too_few_gpus_from_spark_are_named() -> None:
    with pytest.raises(GpuError, match=r"spark.task.resource.gpu.amount"):
        assign([offer(0, task_gpus=("0",))], 2)


def test_gpus_demanded_on_a_host_without_any_are_named() -> None:
    with pytest.raises(GpuError, match=r"host-a .* 0 GPUs.* 1 rank there needs 1 .*per_rank=1\b"):
        assign([offer(0)], 1)


def test_gpu_and_cpu_hosts_do_not_mix() -> None:
    with pytest.raises(GpuError, match=r"host-b .*gpus_per_rank=0"):
        assign([offer(0, "a", host_gpus=("0",)), offer(1, "b")])


def test_a_host_that_the_others_cannot_reach_is_refused() -> None:
    hidden = Offer(0, "a", "host-a", "127.0.0.1", "lo")
    with pytest.raises(LaunchError, match=r"host-a .*127\.0\.0\.1.* 1 other .*spark\.driver\.host"):
        assign([hidden, offer(1, "b")])
    # Containers that share one machine's network are hosts to each other, and reach each other so.
    assert len(assign([hidden, Offer(1, "b", "host-b", "127.0.0.1", "lo")])) == 2


def test_the_table_names_every_rank() -> None:
    slots = assign([offer(0, host_gpus=("4",)), offer(1, "b", host_gpus=("0",))])
    assert describe(slots, {0: 11, 1: 12}) == (
        "rank  host    pid  GPU\n   0  host-a  11   4\n   1  host-b  12   0"
    )


def test_hosts_with_the_same_address_are_refused_unless_they_share_a_machine() -> None:
    with pytest.raises(LaunchError, match=r"host-a and host-b .*10\.0\.2\.15.*GLOO_IFACE"):
        assign([offer(0, "a", address="10.0.2.15"), offer(1, "b", address="10.0.2.15")])
    containers = [offer(0, "a", hostname="one"), offer(1, "a2", hostname="one")]
    assert [slot.address for slot in assign(containers)] == ["10.0.0.97"] * 2


def test_the_table_stays_short_for_many_ranks() -> None:
    lines = describe(assign(offer(t, "ab"[t // 50]) for t in range(100)), {}).splitlines()
    assert [line.split() for line in lines] == [
        ["ranks", "host", "count", "GPUs"],
        ["0-49", "host-a", "50", "-"],
        ["50-99", "host-b", "50", "-"],
    ]


def test_the_table_of_many_hosts_folds_all_but_the_first_ones_and_the_last() -> None:
    offers = [offer(t, f"{t}", hostname=f"host-{t}", address=f"10.0.0.{t}") for t in range(64)]
    lines = describe(assign(offers), {}).splitlines()
    assert len(lines) == 1 + 7 + 1 + 1
    assert lines[8].split() == ["7-62", "56", "more", "hosts", "56", "..."]
    assert lines[9].split() == ["63", "host-63", "1", "-"]


def test_hosts_that_are_short_of_ports_in_the_same_way_share_a_warning() -> None:
    offers = [offer(t, f"{t % 6}", hostname=f"host-{t % 6}", ports=9) for t in range(12)]
    (warning,) = short_of_ports(assign(offers), offers)
    assert warning.startswith("hosts host-0, host-1, host-2, host-3 and 2 more each have 9 ")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([2, 1], "ranks 1-2"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
        (range(0, 20, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18"),
        (range(0, 64, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, ... (32 in all)"),
    ],
)
def test_ranks_are_written_briefly(numbers: list[int], text: str) -> None:
    assert ranks_text(numbers) == text


@pytest.mark.parametrize(
    ("hosts", "ports", "short"),
    [
        ("a" * 68, 28_232, []),  # of which Horovod's Gloo was seen to connect
        ("a" * 70, 28_232, ["host-a has 28,232 ephemeral ports", "70 ranks take up to 28,980"]),
        ("a" * 70, 0, []),  # a host that does not tell
        # Each rank has 5 others, b's one on its own host, and 1 or none of its local_rank.
        ("aaaabb", 93, ["host-a has 93 ephemeral ports", "4 ranks take up to 102"]),
        ("aaaabb", 102, []),
        ("a", 1, []),
    ],
)
def test_hosts_short_of_ports_for_gloo_are_named(hosts: str, ports: int, short: list[str]) -> None:
    offers = [offer(task, host, ports=ports) for task, host in enumerate(hosts)]
    told = short_of_ports(assign(offers), offers)
    assert len(told) == (1 if short else 0)
    assert all(part in told[0] for part in short)
