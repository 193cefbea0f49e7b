"""The answers to MPICH's PMI requests."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.common.slots import Offer, Slot
from horovod_runner.driver.placement import assign
from horovod_runner.wire.framing import frame
from horovod_runner.wire.messages import Assignment, Fence, Lookup, decode_batch, encode
from horovod_runner.worker.startup.pmi import Pmi, process_mapping, segments


def slots(*hosts: str) -> list[Slot]:
    return assign([Offer(task, host, "h", "10.0.0.1", "eth0") for task, host in enumerate(hosts)])


def assignment(*hosts: str, rank: int = 0) -> Assignment:
    every_slot = slots(*hosts)
    mapping = process_mapping(every_slot)
    slot = every_slot[rank]
    return Assignment(slot, "", "", 1, controller="mpi", space="5paces", mapping=mapping)


def test_a_start_on_one_host_looks_up_no_values() -> None:
    sent: list[Fence | Lookup] = []
    pmi = Pmi(assignment("a", "a", rank=1), sent.append)
    # The requests of MPICH 5.0.2, byte for byte, one of them split as a socket may split it. The
    # answer to init waits for all ranks: inside MPICH a waiting rank keeps its core busy.
    assert pmi.feed(b"cmd=init pmi_version=1 pmi_subversion=1\n") == b""
    assert sent == [Fence(1)]
    assert pmi.fenced() == b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"
    answers = [
        pmi.feed(data)
        for data in (
            b"cmd=get_max",
            b"es\n",
            b"cmd=get_appnum\n",
            b"cmd=get_my_kvsname\n",
            b"cmd=get kvsname=5paces key=PMI_process_mapping\n",
            b"cmd=get kvsname=5paces key=PMI_hwloc_xmlfile\n",
            b"cmd=get_universe_size\n",
            b"cmd=barrier_in\n",
            b"cmd=finalize\n",
        )
    ]
    assert answers == [
        b"",
        b"cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0\n",
        b"cmd=appnum appnum=0 rc=0\n",
        b"cmd=my_kvsname kvsname=5paces rc=0\n",
        b"cmd=get_result rc=0 msg=success value=(vector,(0,1,2))\n",
        b"cmd=get_result rc=-1 msg=key_not_found\n",
        b"cmd=universe_size size=2 rc=0\n",
        b"",
        b"cmd=finalize_ack rc=0\n",
    ]
    assert sent == [Fence(1), Fence(1)]
    assert pmi.fenced() == b"cmd=barrier_out rc=0\n"


def test_values_of_other_ranks_are_looked_up_on_demand_and_once_per_fence() -> None:
    sent: list[Fence | Lookup] = []
    pmi = Pmi(assignment("a", "b"), sent.append)
    assert pmi.feed(b"cmd=put kvsname=5paces key=c0 value=one=1\n") == (
        b"cmd=put_result rc=0 msg=success\n"
    )
    pmi.feed(b"cmd=barrier_in\n")
    assert sent == [Fence(0, {"c0": "one=1"})]
    pmi.fenced()
    assert pmi.feed(b"cmd=get kvsname=5paces key=c0\n").endswith(b" value=one=1\n")
    assert pmi.feed(b"cmd=get kvsname=5paces key=c1\n") == b""
    assert sent[1:] == [Lookup(0)]
    values = {"c0": "one=1", "c1": "two"}
    assert pmi.looked_up(values) == b"cmd=get_result rc=0 msg=success value=two\n"
    assert pmi.feed(b"cmd=get kvsname=5paces key=nobodys\n").startswith(b"cmd=get_result rc=-1")
    assert len(sent) == 2
    pmi.feed(b"cmd=barrier_in\n")
    pmi.fenced()
    assert pmi.feed(b"cmd=get kvsname=5paces key=nobodys\n") == b""
    assert sent[2:] == [Fence(0), Lookup(0)]


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (b"cmd=spawn\n", "request 'spawn'"),
        (b"GET / HTTP/1.1\n", "request ''"),
        (b"x" * (65 << 10), "66560 bytes"),
    ],
)
def test_requests_that_are_not_pmi_are_refused(request_: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Pmi(assignment("a"), lambda _: None).feed(request_)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_the_process_mapping_places_every_rank_on_its_host(sizes: list[int]) -> None:
    hosts = [str(host) for host, size in enumerate(sizes) for _ in range(size)]
    text = process_mapping(slots(*hosts))
    # Parsed like MPICH does: blocks of (first host, number of hosts, ranks on each).
    places: list[int] = []
    for block in text.removeprefix("(vector,(").removesuffix("))").split("),("):
        start, count, each = map(int, block.split(","))
        places += [start + host for host in range(count) for _ in range(each)]
    assert places == [int(host) for host in hosts]


def test_the_process_mapping_of_equal_hosts_is_short() -> None:
    hosts = [str(rank // 8) for rank in range(1024)]
    assert process_mapping(slots(*hosts)) == "(vector,(0,128,8))"


def test_shared_memory_segments_are_named_like_mpichs() -> None:
    names = [
        segments(Assignment(slot, "", "", 1, space="kvs", host=host))
        for host, slot in enumerate(slots("a", "b"))
    ]
    # MPICH 5.0.2 left these files behind for the space "kvs".
    assert "/dev/shm/mpich_shm_623612a5_0" in names[0]
    assert "/dev/shm/mpich_vci_623612a5_1" in names[1]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                lambda command, key, value: f"cmd={command} key={key} value={value}\n".encode(),
                st.sampled_from(["init", "put", "get", "barrier_in", "finalize", "spawn", ""]),
                st.text(max_size=5),
                st.text(max_size=5),
            ),
        )
    )
)
def test_any_request_of_a_worker_is_answered_or_refused(pieces: list[bytes]) -> None:
    sent: list[Fence | Lookup] = []
    pmi = Pmi(assignment("a", "b"), sent.append)
    with contextlib.suppress(ValueError):
        for piece in pieces:
            answer = pmi.feed(piece)
            assert not answer or answer.endswith(b"\n")
    for message in sent:
        decode_batch(frame(encode(message)))
