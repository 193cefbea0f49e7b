"""The environment variables of a worker, and the identity and addresses of a host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from horovod_runner.common.slots import Controller, Offer
from horovod_runner.driver.placement import assign
from horovod_runner.errors import LaunchError
from horovod_runner.host import gpus, network
from horovod_runner.wire.messages import Assignment
from horovod_runner.worker.startup import rank_environment
from tests.programs import script


def variables(
    size: int,
    rank: int,
    user: dict[str, str],
    *,
    cores: int = 8,
    controller: Controller = "gloo",
    host_gpus: tuple[str, ...] = ("0", "1"),
) -> dict[str, str]:
    """The variables of a rank of a run on two hosts."""
    offers = [
        Offer(t, f"h{t % 2}", "h", f"10.0.0.{t}", "eth7", host_gpus=host_gpus) for t in range(size)
    ]
    slot = assign(offers)[rank]
    assignment = Assignment(slot, "10.0.0.0:4711/secret", "10.0.0.0", 4712, controller=controller)
    return rank_environment.worker_variables(
        slot, assignment, cores, gpus.environment(slot, "current"), user
    )


def test_horovod_and_torch_get_their_rank_variables() -> None:
    environment = variables(4, 3, {})
    expected = {
        "3": "HOROVOD_RANK RANK",
        "4": "HOROVOD_SIZE WORLD_SIZE",
        "1": "HOROVOD_LOCAL_RANK LOCAL_RANK HOROVOD_CROSS_RANK GROUP_RANK HOROVOD_RUNNER_DEVICE",
        "2": "HOROVOD_LOCAL_SIZE LOCAL_WORLD_SIZE HOROVOD_CROSS_SIZE",
        "h1": "HOROVOD_HOSTNAME",
        "10.0.0.0:4711/secret": "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "4711": "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "10.0.0.0": "MASTER_ADDR",
        "4712": "MASTER_PORT",
        "eth7": "HOROVOD_GLOO_IFACE NCCL_SOCKET_IFNAME",
        "0,1": "CUDA_VISIBLE_DEVICES",
    }
    for value, names in expected.items():
        assert {name: environment[name] for name in names.split()} == dict.fromkeys(
            names.split(), value
        )
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in variables(1, 0, {})


def test_mpi_gets_its_rank_and_the_network_interface(tmp_path: Path) -> None:
    gloo = variables(4, 3, {})
    assert gloo["HOROVOD_CONTROLLER"] == gloo["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert not any(name.startswith(("PMI_", "UCX_")) for name in gloo)
    mpi = variables(4, 3, {}, controller="mpi")
    assert mpi["HOROVOD_CONTROLLER"] == mpi["HOROVOD_CPU_OPERATIONS"] == "mpi"
    assert (mpi["PMI_RANK"], mpi["PMI_SIZE"]) == ("3", "4")
    assert mpi["UCX_NET_DEVICES"] == "eth7"
    for name, value in (("HOROVOD_GLOO_IFACE", "eth8"), ("UCX_NET_DEVICES", "mlx5_0:1")):
        assert variables(4, 3, {name: value}, controller="mpi")["UCX_NET_DEVICES"] == value
    # With InfiniBand, UCX chooses a better device than the named Ethernet interface.
    assert not rank_environment._has_rdma(tmp_path / "infiniband")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert rank_environment._has_rdma(tmp_path / "infiniband")


def test_horovods_poll_interval_is_set_on_cpus_only() -> None:
    assert variables(2, 0, {}, host_gpus=())["HOROVOD_CYCLE_TIME"] == "20"
    assert "HOROVOD_CYCLE_TIME" not in variables(2, 0, {})  # its ranks have GPUs


def test_very_many_ranks_per_core_sleep_while_they_wait_in_mpi() -> None:
    name = "MPIR_CVAR_ENABLE_HEAVY_YIELD"

    def yields(cores: int, user: dict[str, str]) -> str | None:
        return variables(66, 0, user, cores=cores, controller="mpi", host_gpus=()).get(name)

    assert yields(2, {}) == "1"  # 33 ranks of a host
    assert yields(2, {name: "0"}) == "0"
    assert yields(3, {}) is None


def test_the_ranks_of_a_host_share_its_cores() -> None:
    assert variables(4, 0, {}, cores=8)["OMP_NUM_THREADS"] == "4"
    assert variables(4, 0, {}, cores=1)["TF_NUM_INTRAOP_THREADS"] == "1"


def test_user_variables_override_defaults_but_not_the_rank() -> None:
    user = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "ib0", "HOROVOD_GLOO_IFACE": "ib1"}
    environment = variables(2, 1, user | {"HOROVOD_RANK": "9", "CUDA_VISIBLE_DEVICES": "5"})
    kept = {**user, "HOROVOD_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert {name: environment[name] for name in kept} == kept


def test_with_mask_pinning_a_rank_sees_only_its_gpus() -> None:
    offers = [Offer(task, "h", "h", "10.0.0.1", "eth0", host_gpus=("4", "6")) for task in range(2)]
    environment = gpus.environment(assign(offers)[1], "mask")
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment["HOROVOD_RUNNER_DEVICE"] == "0"


def test_cuda_visible_devices_is_parsed_like_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in [
        ("2,3", ("2", "3")),
        (" 0 , GPU-77 ", ("0", "GPU-77")),
        ("1,-1,2", ("1",)),
        ("MIG-GPU-7/1/0", ("MIG-GPU-7/1/0",)),
        ("", ()),
        ("NoDevFiles", ()),  # of Slurm, for a step without GPUs
        ("none", ()),
    ]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus.visible_gpus() == expected
        offer = Offer(0, "h", "h", "10.0.0.1", "eth0", host_gpus=expected)
        # The user's numbering is kept: no order is set.
        assert "CUDA_DEVICE_ORDER" not in gpus.environment(assign([offer])[0], "current")


def test_gpus_are_listed_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = script(tmp_path / "nvidia-smi", "echo '0, NVIDIA X, GPU-a'\necho '1, NVIDIA X, GPU-b'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpus.visible_gpus() == ("0", "1")
    assert gpus.list_gpus()[1] == ("1", "NVIDIA X, GPU-b")
    script(tool, "exit 9")
    assert gpus.visible_gpus() == ()


def test_a_host_id_is_stable_and_usable_in_a_path() -> None:
    assert network.host_id() == network.host_id()
    assert "/" not in network.host_id()


def test_the_route_to_a_peer_has_an_address_and_an_interface() -> None:
    address = network.address_towards("127.0.0.1")
    assert address == "127.0.0.1"
    assert network.interface_of(address) == "lo"
    with pytest.raises(LookupError, match=r"192\.0\.2\.77"):
        network.interface_of("192.0.2.77")


def test_interfaces_have_their_addresses_and_loopback_is_none() -> None:
    assert network.address_of("lo") == "127.0.0.1"
    found = network.interfaces()
    assert "lo" not in [name for name, _, _ in found]
    assert [network.address_of(name) for name, _, _ in found[:1]] == [each[1] for each in found[:1]]
    names = ", ".join(name for name, _, _ in found) or "none"
    with pytest.raises(LaunchError, match=rf"^HOROVOD_GLOO_IFACE=ib7: .*It has: {names}\.$"):
        network.address_of("ib7")


def test_ports_of_the_system_are_counted() -> None:
    range_ = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not range_.exists():
        pytest.skip("this system does not tell")
    first, last = map(int, range_.read_text().split())
    assert network.port_count() == len(range(first, last + 1))


def test_only_a_server_that_allows_reuse_gets_a_held_port() -> None:
    held = network.hold_port()
    port = held.getsockname()[1]
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((address, port))
    with (
        socket.create_server(("127.0.0.1", port)) as server,  # allows reuse, as torch's does
        socket.create_connection(("127.0.0.1", port)),
    ):
        accepted, _ = server.accept()
        accepted.close()
    held.close()


def test_variables_of_spark_of_other_launchers_and_of_an_enclosing_rank_are_withheld() -> None:
    spark = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT", "SPARK_BUFFER_SIZE")
    spark += ("PYSPARK_GATEWAY_SECRET", "PYSPARK_GATEWAY_PORT", "SPARK_AUTH_SOCKET_TIMEOUT")
    rank = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    launchers = ("SLURM_PROCID", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID", "ROLE_RANK", "TF_CONFIG")
    # with srun's, MPICH would abort
    mpi = ("PMI_FD", "PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
    names = (*spark, *rank, *launchers, *mpi, "OTHER", "SLURM_CONF")
    kept = {"OTHER": "hush", "SLURM_CONF": "hush"}
    assert rank_environment.inherited_environment(dict.fromkeys(names, "hush")) == kept


def test_sparks_java_classes_are_removed_from_the_python_path() -> None:
    # A Python package may come in a jar: other jars stay.
    path = ["/app", "/spark/jars/spark-core_2.12-3.5.9.jar", "/jars/graphframes.jar"]
    environment = rank_environment.inherited_environment({"PYTHONPATH": os.pathsep.join(path)})
    assert environment == {"PYTHONPATH": os.pathsep.join([path[0], path[2]])}
