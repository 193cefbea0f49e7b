"""Ranks on several hosts, with a real network between them."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_runner import (
    commit,
    current_attempt,
    load_checkpoint,
    log_to_driver,
    save_checkpoint,
)
from horovod_runner.host.processes import wait_for_end
from tests.cluster.standalone import Place, StandaloneCluster
from tests.conftest import runs
from tests.hosts.drive import Driver
from tests.hosts.network import ADDRESSES, NOWHERE, SECOND, Network, missing
from tests.places import DAEMON
from tests.programs import run

pytestmark = [pytest.mark.spark, pytest.mark.horovod, pytest.mark.places("hosts")]

StartDriver = Callable[..., AbstractContextManager[Driver]]
_SPARK_PORT, _BLOCK_PORT = 20001, 20002
# Nobody answers there: what takes a way through a proxy fails.
_PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://192.0.2.1:3128")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network(tmp_path_factory.mktemp("network")) as opened, pytest.MonkeyPatch.context() as env:
        for name, proxy in _PROXIES.items():
            env.setenv(name, proxy)
        yield opened


@pytest.fixture(scope="module")
def start_driver(
    network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartDriver]:
    """Starts drivers with given settings; the cluster has room for two at a time."""
    workers = [Place(ADDRESSES[host.name], host.enter, cores=4) for host in network.workers]
    master = Place(ADDRESSES["master"], network.master.enter)
    with StandaloneCluster(tmp_path_factory.mktemp("cluster"), workers, master) as cluster:

        def start(settings: dict[str, str]) -> Driver:
            conf = {
                "spark.master": cluster.master,
                "spark.cores.max": "4",
                "spark.executor.cores": "2",
                "spark.executor.memory": "1g",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                **DAEMON,
                **settings,
            }
            return Driver(network.driver, tmp_path_factory.mktemp("driver"), conf)

        yield start


@pytest.fixture(scope="module")
def driver(start_driver: StartDriver) -> Iterator[Driver]:
    settings = {
        "spark.driver.host": ADDRESSES["driver"],
        "spark.driver.port": str(_SPARK_PORT),
        "spark.driver.blockManager.port": str(_BLOCK_PORT),
    }
    with start_driver(settings) as started:
        yield started


def meet() -> list[dict[str, Any]]:
    """What every rank observes, in the order of ranks; the ranks' ``main``."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.ones(1) * (hvd.rank() + 1), op=hvd.Sum)
    sent = sent_by_host()
    connections = psutil.Process().net_connections("tcp")
    interfaces = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    observed = {
        "host": socket.gethostname(),
        "place": (hvd.rank(), hvd.local_rank(), hvd.cross_rank()),
        "sizes": (hvd.size(), hvd.local_size(), hvd.cross_size()),
        "total": float(total),
        "sent": sent,
        "master": os.environ["MASTER_ADDR"],
        "script": sys.argv[0],
        "folder": os.getcwd(),
        "interfaces": {os.environ[name] for name in interfaces},
        "addresses": {c.laddr.ip for c in connections if c.status == psutil.CONN_ESTABLISHED},
    }
    gathered: list[dict[str, Any]] = hvd.allgather_object(observed)
    return gathered


def sent_by_host() -> float:
    """How often the bytes of a tensor leave this host in an allreduce over all ranks."""
    import horovod.torch as hvd
    import torch

    def sent() -> int:
        hvd.barrier()
        (line,) = [
            line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line
        ]
        return int(line.partition(":")[2].split()[8])

    tensor = torch.ones(2_000_003)
    before = sent()
    for _ in range(2):
        assert (hvd.allreduce(tensor, op=hvd.Sum, name="large") == hvd.size()).all()
    return (sent() - before) / 2 / tensor.nbytes


def check(observed: list[dict[str, Any]]) -> None:
    hosts = [rank["host"] for rank in observed]
    assert sorted(hosts) == ["host-a", "host-a", "host-b", "host-b"]
    assert hosts[0] == hosts[1]
    assert [rank["place"] for rank in observed] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    for rank in observed:
        assert rank["sizes"] == (4, 2, 2)
        assert rank["total"] == 1 + 2 + 3 + 4
        # As with one rank on each of two hosts: half of the bytes in each of two steps.
        assert 1 < rank["sent"] < 1.1
        assert rank["interfaces"] == {"eth0"}
        assert rank["script"].endswith("tests/hosts/drive.py")  # the driver's
        assert rank["folder"] != os.getcwd()  # the driver's, and another host has its own
        # Over MPI only one rank of a host is connected to other hosts.
        assert rank["addresses"] <= {ADDRESSES[rank["host"]]}
        assert rank["addresses"] or rank["place"][1], observed


def hostname() -> str:
    return socket.gethostname()


@pytest.fixture
def nameless(network: Network) -> Iterator[None]:
    """No host resolves any name, not even its own."""
    with ExitStack() as hosts:
        for host in (network.driver, *network.workers):
            hosts.enter_context(host.nameless())
        yield


# Another environment or another controller takes other fork servers. The tests that need one come
# first, and those of all later tests are the same.
@pytest.mark.usefixtures("nameless")
def test_a_network_that_the_user_names_is_used_for_everything(driver: Driver) -> None:
    for rank in driver.run(4, meet, env={"HOROVOD_GLOO_IFACE": "eth1"}):
        assert rank["interfaces"] == {"eth1"}
        assert rank["addresses"] <= {SECOND[rank["host"]]}
        assert rank["master"] in SECOND.values()
    error = driver.error(4, meet, env={"HOROVOD_GLOO_IFACE": "eth7"})
    assert "HOROVOD_GLOO_IFACE=eth7" in error
    assert "eth0, eth1" in error


@pytest.mark.usefixtures("nameless")
def test_no_host_needs_to_resolve_a_name(driver: Driver) -> None:
    check(driver.run(4, meet, cpu_collectives="gloo"))


@pytest.mark.parametrize("controller", ["gloo", "auto"])
def test_ranks_of_a_host_are_neighbours_and_use_the_interface_towards_other_hosts(
    driver: Driver, controller: str
) -> None:
    check(driver.run(4, meet, cpu_collectives=controller))


def reduce_with_ddp() -> tuple[float, str]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total), os.environ["MASTER_ADDR"]


def test_ddp_code_runs_on_both_hosts(driver: Driver) -> None:
    total, address = driver.run(4, reduce_with_ddp)
    assert total == 1 + 2 + 3 + 4
    assert address in (ADDRESSES["host-a"], ADDRESSES["host-b"])


def test_the_driver_may_have_a_name_that_resolves_to_loopback_on_its_own_host(
    start_driver: StartDriver,
) -> None:
    settings = {"spark.driver.host": "driver", "spark.driver.bindAddress": "0.0.0.0"}
    with start_driver(settings) as driver:
        where = driver.run(4, hostname, preload_frameworks=False)
    assert where in ("host-a", "host-b")


def test_the_error_names_a_driver_host_that_no_executor_reaches(start_driver: StartDriver) -> None:
    with start_driver({"spark.driver.host": NOWHERE}) as driver:
        error = driver.error(4, hostname, slot_timeout=1, preload_frameworks=False)
    assert "np=4 " in error
    assert f"spark.driver.host={NOWHERE}" in error


def wait_for_a_sign(sign: Path) -> str:
    """Say something, and wait until the test has seen it."""
    log_to_driver(f"in the middle of {sign.parent.name}")
    while not sign.exists():
        threading.Event().wait(0.1)
    save_checkpoint(b"state", 7)
    return hostname()


@pytest.mark.parametrize("seen_by", ["folder", "call"])
def test_behind_a_firewall_that_lets_only_spark_through_a_run_is_seen_while_it_lasts(
    driver: Driver, network: Network, tmp_path: Path, seen_by: str
) -> None:
    """The driver may open connections in "call" and not in "folder"."""
    others = f"{_BLOCK_PORT + 1}-65534"
    sign, kept = tmp_path / "sign", tmp_path / "kept"
    with ExitStack() as rules:
        for host in network.workers:
            rules.enter_context(host.losing(ADDRESSES["driver"], others))
            if seen_by == "call":
                rules.enter_context(host.answering(ADDRESSES["driver"], "20003-32767"))
            else:
                rules.enter_context(network.driver.losing(ADDRESSES[host.name], others, "sport"))
        options = {"checkpoint_dir": kept} if seen_by == "folder" else {}
        driver.start(4, partial(wait_for_a_sign, sign), **options)
        driver.wait_for(f"in the middle of {tmp_path.name}")
        sign.touch()
        value, error = driver.result()
    assert not error, error
    assert value in ("host-a", "host-b")
    if seen_by == "folder":
        assert [file for file in kept.iterdir() if not file.name.startswith(".")]
        driver.wait_for(f"comes through files in {kept}")
        assert driver.run(4, hostname) in ("host-a", "host-b")
    else:
        driver.wait_for("comes over a connection from here to 10.77.0.1")


def test_ranks_of_one_host_need_no_ipv4_network(network: Network) -> None:
    script = (
        "from horovod_runner import HorovodRunner; from tests.hosts.test_hosts import meet; "
        "print(HorovodRunner(np=-2).run(meet)[1]['total'])"
    )
    done = run(*network.ipv6.enter, sys.executable, "-c", script)
    assert done.stdout.splitlines()[-1:] == ["3.0"], done.stderr


def train_for_ever() -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    weights = torch.ones(1000)
    for step in range(1 << 40):
        hvd.allreduce(weights, name="weights")
        if step == 100 and hvd.rank() == 0:
            log_to_driver("in the middle of the training")


def add_up_until_two_are_left() -> tuple[list[int], list[int]]:
    """Do steps until a host is lost, and some more: the sizes and the numbers of the steps."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    loaded = load_checkpoint()
    state = {"steps": [], "sizes": []} if loaded is None else loaded.state
    if current_attempt() > 1:
        assert loaded is not None
    while len(state["steps"]) < 10 or state["sizes"][-10] == 4:
        hvd.allreduce(torch.ones(1), name="step")
        state["steps"].append(len(state["steps"]))
        state["sizes"].append(hvd.size())
        commit(state, len(state["steps"]))
        if current_attempt() == 1 and len(state["steps"]) == 10:
            log_to_driver("in the middle of the training")
    return state["sizes"], state["steps"]


def test_a_run_goes_on_without_a_host_that_is_cut_off(
    start_driver: StartDriver, network: Network
) -> None:
    lost = network.workers[1]
    # An application of its own: Spark does not use that host again.
    with start_driver({"spark.driver.host": ADDRESSES["driver"]}) as driver:
        driver.start((2, 4), add_up_until_two_are_left, max_restarts=3, slot_timeout=60)
        driver.wait_for("in the middle of the training")
        network.unplug(lost)
        try:
            value, error = driver.result()
        finally:
            network.plug(lost)
    assert not error, error
    sizes, steps = value
    assert sorted({*sizes}) == [2, 4]
    assert steps == list(range(len(sizes)))  # the commit of the other host has them all


def test_a_lost_host_ends_the_run_and_is_named(driver: Driver, network: Network) -> None:
    """The last test of this file: Spark does not use that host again."""
    lost = network.workers[1]
    driver.start(4, train_for_ever)
    driver.wait_for("in the middle of the training")
    network.unplug(lost)
    _, error = driver.result()
    assert lost.name in error
    processes = [process for host in network.workers for process in host.processes()]
    ranks = [process for process in processes if runs(process, "horovod_runner.worker.main")]
    assert wait_for_end(ranks, 15) == []
