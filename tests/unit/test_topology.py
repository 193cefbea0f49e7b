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


@pytest.mark.parametrize(
    ("offers", "gpus_per_rank", "gpus", "host_gpus"),
    [
        # Spark gives none: they are dealt by local_rank.
        ([offer(task, host_gpus=("3", "5", "7")) for task in range(2)], None, "3 5", "3 5"),
        ([offer(0, task_gpus=("1",)), offer(1, task_gpus=("0",))], None, "1 0", "1 0"),
        ([offer(task, host_gpus=tuple("0123")) for task in range(2)], 2, "0,1 2,3", "0 2 1 3"),
        ([offer(task, host_gpus=("0",)) for task in range(2)], 0.5, "0 0", "0"),
        ([offer(task, host_gpus=("0", "1")) for task in range(3)], 0.4, "0 0 1", "0 1"),
        ([offer(task, host_gpus=("0", "1")) for task in range(2)], 0.7, "0 1", "0 1"),
        ([offer(task, task_gpus=("0",)) for task in range(2)], 0.5, "0 0", "0"),
        ([offer(0, task_gpus=("0",))], 0, "", ""),
    ],
)
def test_each_rank_gets_its_gpus_and_sees_its_first_at_its_local_rank(
    offers: list[Offer], gpus_per_rank: float | None, gpus: str, host_gpus: str
) -> None:
    slots = assign(offers, gpus_per_rank)
    assert " ".join(",".join(slot.gpus) for slot in slots) == gpus
    assert {slot.host_gpus for slot in slots} == {tuple(host_gpus.split())}


HIDDEN = Offer(0, "a", "host-a", "127.0.0.1", "lo")


@pytest.mark.parametrize(
    ("offers", "gpus_per_rank", "text"),
    [
        (
            [offer(task, host_gpus=("0",)) for task in range(2)],
            None,
            r"host-a .* 1 GPU.* 2 ranks .* 2 .*gpus_per_rank=1\b.* below 1 ",
        ),
        (
            [offer(task, host_gpus=("0",)) for task in range(3)],
            0.34,
            r" 1 GPU, .* 3 ranks there need 2 .*=0\.34\. .* lower gpus_per_rank: at 0 they train",
        ),
        (
            [offer(task, task_gpus=("0",)) for task in range(2)],
            None,
            r"tasks 0 and 1 .*host-a .*GPU 0\b",
        ),
        ([offer(0, task_gpus=("0",))], 2, r"spark\.task\.resource\.gpu\.amount"),
        ([offer(0)], 1, r"host-a .* 0 GPUs.* 1 rank there needs 1 .*per_rank=1\b"),
        ([offer(0, "a", host_gpus=("0",)), offer(1, "b")], None, r"host-b .*gpus_per_rank=0"),
    ],
)
def test_gpus_that_do_not_fit_are_refused(
    offers: list[Offer], gpus_per_rank: float | None, text: str
) -> None:
    with pytest.raises(GpuError, match=text):
        assign(offers, gpus_per_rank)


@pytest.mark.parametrize(
    ("offers", "text"),
    [
        ([HIDDEN, offer(1, "b")], r"host-a .*127\.0\.0\.1.* 1 other .*spark\.driver\.host"),
        (
            [offer(0, "a", address="10.0.2.15"), offer(1, "b", address="10.0.2.15")],
            r"host-a and host-b .*10\.0\.2\.15.*GLOO_IFACE",
        ),
    ],
)
def test_hosts_that_cannot_reach_each_other_are_refused(offers: list[Offer], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        assign(offers)


def test_containers_of_one_machine_share_its_network() -> None:
    """They are hosts to each other, and reach each other by its addresses."""
    assert len(assign([HIDDEN, Offer(1, "b", "host-b", "127.0.0.1", "lo")])) == 2
    containers = [offer(0, "a", hostname="one"), offer(1, "a2", hostname="one")]
    assert [slot.address for slot in assign(containers)] == ["10.0.0.97"] * 2


def test_the_table_names_every_rank() -> None:
    slots = assign([offer(0, host_gpus=("4",)), offer(1, "b", host_gpus=("0",))])
    assert describe(slots, {0: 11, 1: 12}) == (
        "rank  host    pid  GPU\n   0  host-a  11   4\n   1  host-b  12   0"
    )


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
