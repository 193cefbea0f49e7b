"""horovod_runner.spmd: its decisions, its data structures, and all calls in a single process."""

from __future__ import annotations

import contextlib
import socket
import sys
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
from horovod_runner.spmd import calls, discovery
from horovod_runner.spmd.leaves import flatten, rebuild
from horovod_runner.spmd.meeting import Alone, StoreMeeting
from horovod_runner.spmd.mesh import Mesh, _Introduction
from horovod_runner.spmd.redistribute import _steps, moves, redistribute, shares
from horovod_runner.spmd.session import Session
from horovod_runner.spmd.trainers import Interface, Participant, address_towards, choose_trainers

ETHERNET = "255.255.255.0"


def participant(rank: int, host: str = "a", *gpus: str, **more: Any) -> Participant:
    number = ord(host) - ord("a") + 1
    interface = Interface("eth0", f"10.0.0.{number}", ETHERNET)
    return Participant(rank, host, f"host-{host}", gpus, **{"interfaces": (interface,), **more})


def test_without_gpus_all_ranks_train() -> None:
    trainers = choose_trainers([participant(0), participant(1), participant(2, "b")])
    assert [(t.rank, t.device) for t in trainers] == [(0, None), (1, None), (2, None)]
    assert [t.slot.local_rank for t in trainers] == [0, 1, 0]
    assert {t.slot.size for t in trainers} == {3}


def test_ranks_per_host_leaves_the_others_idle() -> None:
    trainers = choose_trainers([participant(i, "ab"[i // 3]) for i in range(6)], ranks_per_host=2)
    assert [t.rank for t in trainers] == [0, 1, 3, 4]
    assert [t.slot.cross_rank for t in trainers] == [0, 0, 1, 1]


def test_one_rank_trains_for_each_gpu() -> None:
    ranks = [participant(i, "a", "GPU-1", "GPU-2") for i in range(4)]
    ranks += [participant(4, "b", "GPU-3"), participant(5, "b", "GPU-3"), participant(6, "c")]
    trainers = choose_trainers(ranks)
    assert [(t.rank, t.device) for t in trainers] == [(0, 0), (1, 1), (4, 0)]
    assert [t.slot.local_size for t in trainers] == [2, 2, 1]


def test_a_rank_trains_on_the_only_gpu_that_slurm_shows_it() -> None:
    # Both ranks see one GPU, and it has index 0 for both.
    trainers = choose_trainers(
        [participant(0, "a", "GPU-1"), participant(1, "a", "GPU-2"), participant(2, "a")]
    )
    assert [(t.rank, t.device) for t in trainers] == [(0, 0), (1, 0)]


def test_horovod_ranks_of_a_host_are_consecutive() -> None:
    ranks = [participant(0, "a"), participant(1, "b"), participant(2, "a"), participant(3, "b")]
    trainers = choose_trainers(ranks)
    assert [t.rank for t in trainers] == [0, 2, 1, 3]
    assert [t.slot.rank for t in trainers] == [0, 1, 2, 3]


def test_hosts_use_the_first_network_that_all_have() -> None:
    bridge = Interface("docker0", "172.17.0.1", "255.255.0.0")
    ranks = [
        participant(0, "a", interfaces=(bridge, Interface("eth0", "10.0.0.1", ETHERNET))),
        participant(1, "b", interfaces=(bridge, Interface("ib0", "10.0.0.2", ETHERNET))),
    ]
    assert [t.slot.interface for t in choose_trainers(ranks)] == ["eth0", "ib0"]
    assert address_towards(ranks[1], ranks[0]) == "10.0.0.1"
    assert address_towards(ranks[0], participant(5, "a")) == "127.0.0.1"


def test_on_routed_networks_hosts_use_their_default_route_and_without_one_are_listed() -> None:
    def on_network(rank: int, default: str) -> Participant:
        interface = Interface("e", f"10.{rank}.0.1", ETHERNET)
        return participant(rank, "ab"[rank], interfaces=(interface,), default=default)

    routed = [on_network(0, "10.0.0.1"), on_network(1, "10.1.0.1")]
    assert [t.slot.address for t in choose_trainers(routed)] == ["10.0.0.1", "10.1.0.1"]
    with pytest.raises(LaunchError, match=r" 2 hosts .*10.0.0.1.*10.1.0.1.*HOROVOD_GLOO_IFACE"):
        choose_trainers([on_network(0, ""), on_network(1, "")])


def test_the_interface_that_the_user_chose_is_used_and_must_exist() -> None:
    def two(number: int) -> tuple[Interface, Interface]:
        ib0 = Interface("ib0", f"10.9.0.{number}", ETHERNET)
        return Interface("eth0", f"10.0.0.{number}", ETHERNET), ib0

    ranks = [participant(i, "ab"[i], interfaces=two(i), chosen="ib0") for i in range(2)]
    assert {t.slot.interface for t in choose_trainers(ranks)} == {"ib0"}
    ranks[1] = participant(1, "b", chosen="ib0")
    with pytest.raises(LaunchError, match=r"HOROVOD_GLOO_IFACE=ib0 .*host-b.*eth0"):
        choose_trainers(ranks)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_shares_differ_by_one_row_at_most(rows: int, parts: int) -> None:
    ranges = shares(rows, parts)
    sizes = [end - begin for begin, end in ranges]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=7).flatmap(
        lambda rows: st.tuples(
            st.just(rows),
            st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True),
        )
    )
)
def test_every_row_moves_to_its_place_once(case: tuple[list[int], list[int]]) -> None:
    rows, targets = case
    data = np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])
    expected = [np.arange(sum(rows))[begin:end] for begin, end in shares(sum(rows), len(targets))]
    received = {target: np.full(len(e), -1) for target, e in zip(targets, expected, strict=True)}
    for move in moves(rows, targets):
        piece = data[move.source][move.begin : move.end]
        assert (received[move.target][move.at : move.at + len(piece)] == -1).all()
        received[move.target][move.at : move.at + len(piece)] = piece
    for target, values in zip(targets, expected, strict=True):
        assert received[target].tolist() == values.tolist()


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0, 64 << 20))
def test_pieces_are_small_and_contain_all_rows(begin: int, rows: int, row_bytes: float) -> None:
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


def test_a_structure_is_flattened_and_rebuilt() -> None:
    data = {"a": np.zeros(2), "b": (np.ones(3), [pd.Series([1])]), "c": Pair(np.zeros(1), {})}
    assert [path for path, _ in flatten(data)] == [
        "data['a']",
        "data['b'][0]",
        "data['b'][1][0]",
        "data['c'][0]",
    ]
    rebuilt = rebuild(data, iter([1, 2, 3, 4]))
    assert rebuilt == {"a": 1, "b": (2, [3]), "c": Pair(4, {})}
    assert isinstance(rebuilt["c"], Pair)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": None}, r"data\['x'\] .*NoneType.*empty"),
        (np.float64(3), "numpy.float64"),
        (np.array(3), r"^data .*\(\)\. .*\(1,\)$"),
        (np.ma.zeros(3), "MaskedArray"),
        ([np.zeros(2), "text"], r"data\[1\] .*builtins.str"),
    ],
)
def test_unsupported_data_are_named_in_the_error(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        list(flatten(data))


class TwoRanks:
    """Stands for this rank and another one that calls prepare_data with other data."""

    rank, size = 0, 2

    def __init__(self, other: Any) -> None:
        self._other = other

    def allgather(self, value: bytes) -> list[bytes]:
        sent: list[bytes] = []

        class OtherRank(TwoRanks):
            def allgather(self, value: bytes) -> list[bytes]:
                sent.append(value)
                raise StopIteration

        with pytest.raises(StopIteration):
            redistribute(self._other, OtherRank(None), [0])  # type: ignore[arg-type]
        return [value, *sent]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (np.zeros(2), None, "rank 1: data .*NoneType"),
        (np.zeros(2), [np.zeros(2)], r"Rank 0: data: Array. Rank 1: data\[0\]: Array"),
        ({"x": np.zeros(2)}, {"y": np.zeros(2)}, r"Rank 1: data\['y'\]"),
        (np.zeros(2), np.zeros(2, "f4"), "^data .*ranks 0, 1: .*float64 .*float32"),
        (np.array(["a"]), np.array([12345]), "ranks 0, 1: dtype <U1 .*int64"),
        (np.array(["a"]), np.array([b"a"]), r"ranks 0, 1: dtype <U1 .*\|S1"),
        (np.zeros((2, 3)), np.zeros((2, 4)), r"ranks 0, 1: .*\(3,\) .*\(4,\)"),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]}), r"columns \['a'\].*\['b'\]"),
        (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [0.5]}), "'a' .*int64 .*float64"),
        (pa.table({"a": [1]}), pa.table({"a": ["x"]}), "a: int64.*a: string"),
        (np.array([{}]), np.array([[{}]]), r"ranks 0, 1: .*\(\) .*\(1,\)"),
    ],
)
def test_data_that_do_not_fit_together_are_named_on_all_ranks(
    one: Any, other: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        redistribute(one, TwoRanks(other), [0])  # type: ignore[arg-type]


def leaf_of(data: Any) -> Any:
    ((_, leaf),) = flatten(data)
    return leaf


def test_shape_and_dtype_of_a_rank_without_rows_do_not_matter() -> None:
    alone = Mesh(Alone(), participant(0))
    assert redistribute(np.empty((0, 5)), alone, [0]).shape == (0, 5)
    leaf, other = (leaf_of(data) for data in (np.empty(0), np.ones((0, 3), "f4")))
    conformed = leaf.conform([other.schema])
    assert (conformed.data.shape, conformed.data.dtype) == ((0, 3), np.float32)
    alone.close(together=True)


def test_texts_are_as_wide_as_the_widest() -> None:
    leaf, other = leaf_of(np.array(["a", "bb"])), leaf_of(np.array(["ccccc"]))
    conformed = leaf.conform([leaf.schema, other.schema])
    assert conformed.data.dtype == np.dtype("<U5")
    assert conformed.data.tolist() == ["a", "bb"]


def test_data_that_need_not_move_are_not_copied() -> None:
    alone = Mesh(Alone(), participant(0))
    data = {"x": np.arange(3), "t": pa.table({"a": [1]}), "f": pd.DataFrame({"a": [1]})}
    result = redistribute(data, alone, [0])
    assert all(result[name] is value for name, value in data.items())
    alone.close(together=True)


class ThreadMeeting:
    """A meeting of threads, each of which stands for a rank."""

    size = 2

    def __init__(self) -> None:
        self.values = [b""] * self.size
        self._all = threading.Barrier(self.size)

    def join(self, rank: int) -> Mesh:
        def allgather(value: bytes) -> list[bytes]:
            self.values[rank] = value
            self._all.wait(30)
            return self.values

        return Mesh(
            SimpleNamespace(rank=rank, size=self.size, allgather=allgather), participant(rank)
        )


@contextlib.contextmanager
def connect_without_key(contact: _Introduction) -> Iterator[zmq.Socket[bytes]]:
    """Connect to a rank with a key that it does not know; yields the connection's events."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = contact.public_key
        with stranger.get_monitor_socket() as events:
            stranger.connect(f"tcp://127.0.0.1:{contact.port}")
            yield events


def test_only_ranks_of_the_program_can_connect() -> None:
    meeting = ThreadMeeting()
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as opened:
        meshes = list(threads.map(meeting.join, range(2)))
        for mesh in meshes:
            opened.callback(mesh.close, together=True)
        gathered = threads.map(lambda mesh: mesh.allgather(b"%d" % mesh.rank), meshes)
        assert list(gathered) == [[b"0", b"1"]] * 2
        ends = {zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH}
        contact = msgspec.msgpack.decode(meeting.values[0], type=_Introduction)
        with connect_without_key(contact) as events:
            event = 0
            while event not in ends:
                assert events.poll(30_000)
                event = recv_monitor_message(events)["event"]
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_without_start_queries_are_false_and_prepare_data_raises() -> None:
    assert not spmd.initialized()
    assert not spmd.is_cuda_available()
    spmd.end()
    spmd.end()
    with pytest.raises(RuntimeError, match=r"spmd\.prepare_data\(\) .*spmd\.start\(\)"):
        spmd.prepare_data(np.zeros(1))


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"^framework .*'torch', 'tensorflow', 'keras', .*'jax'"):
        spmd.start("jax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ranks_per_host .* 1, .* 0$"):
        spmd.start("torch", ranks_per_host=0)


def test_an_error_of_old_code_at_the_end_of_the_program_has_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.0"))
    try:
        raise ValueError("Argument(s) not recognized: {'lr': 0.1}")
    except ValueError as error:
        calls.tell_of_exit(Session(Mesh(Alone(), participant(0))), error)
    note = capsys.readouterr().err
    assert f"{__file__}, line " in note
    assert "mpirun -x TF_USE_LEGACY_KERAS=1" in note
    assert not spmd.initialized()


def test_only_an_exception_of_the_training_fails_it_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[BaseException] = []
    monkeypatch.setattr(Session, "fail", lambda _, error: told.append(error))
    monkeypatch.setattr(calls, "start_horovod", lambda *_: None)  # this process needs none

    def train() -> None:
        spmd.start("torch")
        try:
            raise ValueError("of the training")
        finally:
            spmd.end()

    try:
        raise ModuleNotFoundError("of the program's other way")
    except ModuleNotFoundError:
        spmd.start("torch")
        spmd.end()
        with pytest.raises(ValueError, match="of the training") as raised:
            train()
    assert told == [raised.value]


def test_srun_without_an_mpi_plugin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROCID": "1", "STEP_ID": "0", "STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(LaunchError, match=r"4 tasks.*--mpi=pmix.*horovod-runner run"):
        discovery.find(participant(0))


def test_an_elastic_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(LaunchError, match="--min-np"):
        StoreMeeting()


def test_a_rendezvous_server_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = {"RANK": 0, "SIZE": 2, "GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    for name, value in {**given, "GLOO_RENDEZVOUS_PORT": port}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    with pytest.raises(LaunchError, match=r"rendezvous server does not answer: .*refused"):
        StoreMeeting().allgather(b"")
