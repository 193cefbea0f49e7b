"""What horovod_runner.spmd decides before anything moves; and all of it in a single process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from horovod_runner import DataError, LaunchError, spmd
from horovod_runner.spmd import discovery
from horovod_runner.spmd.leaves import flatten
from horovod_runner.spmd.mesh import Alone, Mesh, StoreMeeting, _Word
from horovod_runner.spmd.placement import (
    Interface,
    Member,
    address_towards,
    shares,
    trainers,
)
from horovod_runner.spmd.redistribute import _steps, moves, redistribute

ETHERNET = "255.255.255.0"


def member(rank: int, host: str = "a", *gpus: str, **more: Any) -> Member:
    number = ord(host) - ord("a") + 1
    interface = Interface("eth0", f"10.0.0.{number}", ETHERNET)
    return Member(rank, host, f"host-{host}", gpus, **{"interfaces": (interface,), **more})


def test_without_gpus_all_ranks_train() -> None:
    found = trainers([member(0), member(1), member(2, "b")])
    assert [(each.rank, each.device) for each in found] == [(0, None), (1, None), (2, None)]
    assert [each.slot.local_rank for each in found] == [0, 1, 0]
    assert {each.slot.size for each in found} == {3}


def test_ranks_per_host_leaves_the_others_idle() -> None:
    found = trainers([member(i, "ab"[i // 3]) for i in range(6)], ranks_per_host=2)
    assert [each.rank for each in found] == [0, 1, 3, 4]
    assert [each.slot.cross_rank for each in found] == [0, 0, 1, 1]


def test_one_rank_trains_for_each_gpu() -> None:
    ranks = [member(i, "a", "GPU-1", "GPU-2") for i in range(4)]
    ranks += [member(4, "b", "GPU-3"), member(5, "b", "GPU-3"), member(6, "c")]
    found = trainers(ranks)
    assert [(each.rank, each.device) for each in found] == [(0, 0), (1, 1), (4, 0)]
    assert [each.slot.local_size for each in found] == [2, 2, 1]


def test_a_gpu_that_slurm_gave_to_one_task_is_that_ranks() -> None:
    # Each sees its own alone, and both call it the first.
    found = trainers([member(0, "a", "GPU-1"), member(1, "a", "GPU-2"), member(2, "a")])
    assert [(each.rank, each.device) for each in found] == [(0, 0), (1, 0)]


def test_ranks_that_are_scattered_over_hosts_are_neighbours_to_horovod() -> None:
    found = trainers([member(0, "a"), member(1, "b"), member(2, "a"), member(3, "b")])
    assert [each.rank for each in found] == [0, 2, 1, 3]
    assert [each.slot.rank for each in found] == [0, 1, 2, 3]


def test_hosts_meet_on_the_network_that_all_have() -> None:
    own = Interface("docker0", "172.17.0.1", "255.255.0.0")
    ranks = [
        member(0, "a", interfaces=(own, Interface("eth0", "10.0.0.1", ETHERNET))),
        member(1, "b", interfaces=(own, Interface("ib0", "10.0.0.2", ETHERNET))),
    ]
    assert [each.slot.interface for each in trainers(ranks)] == ["eth0", "ib0"]
    assert address_towards(ranks[1], ranks[0]) == "10.0.0.1"
    assert address_towards(ranks[0], member(5, "a")) == "127.0.0.1"


def test_on_routed_networks_the_default_route_leads_to_the_others() -> None:
    ranks = [
        member(0, "a", interfaces=(Interface("e", "10.1.0.1", ETHERNET),), default="10.1.0.1"),
        member(1, "b", interfaces=(Interface("e", "10.2.0.1", ETHERNET),), default="10.2.0.1"),
    ]
    assert [each.slot.address for each in trainers(ranks)] == ["10.1.0.1", "10.2.0.1"]


def test_the_users_interface_wins_and_must_be_there() -> None:
    two = (Interface("eth0", "10.0.0.1", ETHERNET), Interface("ib0", "10.9.0.1", ETHERNET))
    ranks = [member(i, "ab"[i], interfaces=two, chosen="ib0") for i in range(2)]
    assert {each.slot.interface for each in trainers(ranks)} == {"ib0"}
    ranks[1] = member(1, "b", chosen="ib0")
    with pytest.raises(LaunchError, match=r"HOROVOD_GLOO_IFACE=ib0 on host-b.*eth0"):
        trainers(ranks)


def test_hosts_without_a_common_network_are_told() -> None:
    ranks = [
        member(0, "a", interfaces=(Interface("eth0", "10.1.0.1", ETHERNET),)),
        member(1, "b", interfaces=(Interface("eth0", "10.2.0.1", ETHERNET),)),
    ]
    with pytest.raises(LaunchError, match=r"2 hosts have no network in common.*10.1.0.1.*10.2.0.1"):
        trainers(ranks)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_shares_differ_by_one_row_at_most(rows: int, parts: int) -> None:
    found = shares(rows, parts)
    sizes = [end - begin for begin, end in found]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert [begin for begin, _ in found[1:]] == [end for _, end in found[:-1]]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=7).flatmap(
        lambda rows: st.tuples(
            st.just(rows),
            st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True),
        )
    )
)
def test_every_row_goes_to_its_place_once(case: tuple[list[int], list[int]]) -> None:
    rows, targets = case
    data = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    expected = [np.arange(sum(rows))[begin:end] for begin, end in shares(sum(rows), len(targets))]
    got = {target: np.full(len(e), -1) for target, e in zip(targets, expected, strict=True)}
    for move in moves(rows, targets):
        piece = data[move.source][move.begin : move.end]
        assert (got[move.target][move.at : move.at + len(piece)] == -1).all()
        got[move.target][move.at : move.at + len(piece)] = piece
    for target, values in zip(targets, expected, strict=True):
        assert got[target].tolist() == values.tolist()


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0, 64 << 20))
def test_pieces_are_small_and_lack_no_row(begin: int, rows: int, row_bytes: float) -> None:
    pieces = list(_steps(begin, begin + rows, row_bytes))
    assert [row for first, last in pieces for row in range(first, last)] == [
        *range(begin, begin + rows)
    ]
    assert all(
        last - first == 1 or (last - first) * row_bytes <= 16 << 20 for first, last in pieces
    )


class Pair(NamedTuple):
    x: Any
    y: Any


def test_structures_are_taken_apart_and_put_together() -> None:
    data = {"a": np.zeros(2), "b": (np.ones(3), [pd.Series([1])]), "c": Pair(np.zeros(1), {})}
    leaves, rebuild = flatten(data)
    assert [path for path, _ in leaves] == [
        "data['a']",
        "data['b'][0]",
        "data['b'][1][0]",
        "data['c'][0]",
    ]
    again = rebuild([1, 2, 3, 4])
    assert again == {"a": 1, "b": (2, [3]), "c": Pair(4, {})}
    assert isinstance(again["c"], Pair)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"x": None}, r"data\['x'\] is a builtins.NoneType.*empty one"),
        (np.float64(3), "numpy.float64"),
        (np.array(3), "without rows"),
        (np.ma.zeros(3), "MaskedArray"),
        ([np.zeros(2), "text"], r"data\[1\] is a builtins.str"),
    ],
)
def test_what_cannot_be_moved_is_named(data: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        flatten(data)


class Two:
    """What this rank would hear from another one that has given something else."""

    rank, size = 0, 2

    def __init__(self, other: Any) -> None:
        self._other = other

    def allgather(self, value: bytes) -> list[bytes]:
        said: list[bytes] = []

        class Listen(Two):
            def allgather(self, value: bytes) -> list[bytes]:
                said.append(value)
                raise StopIteration

        with pytest.raises(StopIteration):
            redistribute(self._other, Listen(None), [0])  # type: ignore[arg-type]
        return [value, *said]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (np.zeros(2), None, "rank 1: data is a builtins.NoneType"),
        (np.zeros(2), [np.zeros(2)], r"Rank 0: data: Array. Rank 1: data\[0\]: Array"),
        ({"x": np.zeros(2)}, {"y": np.zeros(2)}, r"Rank 1: data\['y'\]"),
        (np.zeros(2), np.zeros(2, "f4"), "dtype float64 and dtype float32"),
        (np.zeros((2, 3)), np.zeros((2, 4)), r"shape \(3,\) and rows of shape \(4,\)"),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]}), r"columns \['a'\].*\['b'\]"),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [0.5]}), "'a' of int64 and of float64"),
        (pa.table({"a": [1]}), pa.table({"a": ["x"]}), "a: int64.*a: string"),
        (np.array([{}]), np.array([[{}]]), "shape"),
    ],
)
def test_what_does_not_fit_is_told_on_all_ranks(one: Any, other: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        redistribute(one, Two(other), [0])  # type: ignore[arg-type]


def test_the_size_of_an_empty_ranks_rows_and_its_dtype_do_not_matter() -> None:
    alone = Mesh(Alone(), member(0))
    assert redistribute(np.empty((0, 5)), alone, [0]).shape == (0, 5)
    own, said = np.empty(0), np.ones((0, 3), "f4")
    leaf = flatten(own)[0][0][1]
    found: Any = leaf.conform([flatten(said)[0][0][1].schema])
    assert (found.data.shape, found.data.dtype) == ((0, 3), np.float32)
    alone.close(together=True)


def test_texts_are_as_wide_as_the_widest() -> None:
    leaf: Any = flatten(np.array(["a", "bb"]))[0][0][1]
    other: Any = flatten(np.array(["ccccc"]))[0][0][1]
    found: Any = leaf.conform([leaf.schema, other.schema])
    assert found.data.dtype == np.dtype("<U5")
    assert found.data.tolist() == ["a", "bb"]


def test_what_stays_is_not_copied() -> None:
    alone = Mesh(Alone(), member(0))
    data = {"x": np.arange(3), "t": pa.table({"a": [1]}), "f": pd.DataFrame({"a": [1]})}
    found = redistribute(data, alone, [0])
    assert all(found[name] is value for name, value in data.items())
    alone.close(together=True)


class Together:
    """Where threads meet, each a rank."""

    size = 2

    def __init__(self) -> None:
        self.said = [b""] * self.size
        self._all = threading.Barrier(self.size)

    def join(self, rank: int) -> Mesh:
        def allgather(value: bytes) -> list[bytes]:
            self.said[rank] = value
            self._all.wait(30)
            return self.said

        return Mesh(SimpleNamespace(rank=rank, size=self.size, allgather=allgather), member(rank))


@contextlib.contextmanager
def knocking(word: _Word) -> Iterator[zmq.Socket[bytes]]:
    """Events of a stranger's connection to a rank: the rank does not know the stranger's keys."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = word.public_key
        with stranger.get_monitor_socket() as events:
            stranger.connect(f"tcp://127.0.0.1:{word.port}")
            yield events


def test_ranks_let_each_other_in_and_nobody_else() -> None:
    meeting = Together()
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as opened:
        meshes = list(threads.map(meeting.join, range(2)))
        for mesh in meshes:
            opened.callback(mesh.close, together=True)
        said = threads.map(lambda mesh: mesh.allgather(b"%d" % mesh.rank), meshes)
        assert list(said) == [[b"0", b"1"]] * 2
        ends = {zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH}
        with knocking(msgspec.msgpack.decode(meeting.said[0], type=_Word)) as events:
            event = 0
            while event not in ends:
                assert events.poll(30_000)
                event = recv_monitor_message(events)["event"]
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_calls_without_a_start_are_told_or_do_nothing() -> None:
    assert not spmd.initialized()
    assert not spmd.is_cuda_available()
    spmd.end()
    spmd.end()
    with pytest.raises(RuntimeError, match=r"needs spmd.start\(\)"):
        spmd.prepare_data(np.zeros(1))


def test_wrong_arguments_are_told_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="must be one of 'torch', 'tensorflow', 'keras', not 'jax"):
        spmd.start("jax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        spmd.start("torch", ranks_per_host=0)


def test_srun_without_an_mpi_plugin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROCID": "1", "STEP_ID": "0", "STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(LaunchError, match=r"4 tasks.*--mpi=pmix.*horovod-runner run"):
        discovery.find(member(0))


def test_an_elastic_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(LaunchError, match="--min-np"):
        StoreMeeting()
