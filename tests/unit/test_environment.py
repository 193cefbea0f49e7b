"""The variables of a worker, and the host's place in the network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from horovod_runner import environment, gpu, host
from horovod_runner.messages import Assignment, Controller
from horovod_runner.topology import Offer, assign


def variables(
    size: int,
    rank: int,
    user: dict[str, str],
    cores: int = 8,
    controller: Controller = "gloo",
) -> dict[str, str]:
    offers = [
        Offer(t, f"h{t % 2}", "h", f"10.0.0.{t}", "eth7", host_gpus=("0", "1")) for t in range(size)
    ]
    slots = assign(offers)
    slot = slots[rank]
    assignment = Assignment(slot, "10.0.0.0:4711/secret", "10.0.0.0", 4712, controller=controller)
    return environment.worker_variables(
        slot, assignment, cores, gpu.environment(slot, "current"), user
    )


def test_horovod_and_torch_find_their_ranks() -> None:
    found = variables(4, 3, {})
    assert found["HOROVOD_RANK"] == found["RANK"] == "3"
    assert found["HOROVOD_SIZE"] == found["WORLD_SIZE"] == "4"
    assert found["HOROVOD_LOCAL_RANK"] == found["LOCAL_RANK"] == "1"
    assert found["HOROVOD_LOCAL_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
    assert found["HOROVOD_CROSS_RANK"] == found["GROUP_RANK"] == "1"
    assert found["HOROVOD_CROSS_SIZE"] == "2"
    assert found["HOROVOD_HOSTNAME"] == "h1"
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.0:4711/secret"
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.0", "4712")
    assert found["HOROVOD_GLOO_IFACE"] == found["NCCL_SOCKET_IFNAME"] == "eth7"
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found["HOROVOD_RUNNER_DEVICE"] == "1"


def test_mpi_finds_its_rank_and_keeps_to_the_jobs_network(tmp_path: Path) -> None:
    gloo = variables(4, 3, {})
    assert gloo["HOROVOD_CONTROLLER"] == gloo["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert not any(name.startswith(("PMI_", "UCX_")) for name in gloo)
    mpi = variables(4, 3, {}, controller="mpi")
    assert mpi["HOROVOD_CONTROLLER"] == mpi["HOROVOD_CPU_OPERATIONS"] == "mpi"
    assert (mpi["PMI_RANK"], mpi["PMI_SIZE"]) == ("3", "4")
    assert mpi["UCX_NET_DEVICES"] == "eth7"
    named = variables(4, 3, {"HOROVOD_GLOO_IFACE": "eth8"}, controller="mpi")
    assert named["UCX_NET_DEVICES"] == "eth8"
    users = variables(4, 3, {"UCX_NET_DEVICES": "mlx5_0:1"}, controller="mpi")
    assert users["UCX_NET_DEVICES"] == "mlx5_0:1"
    # Where there is InfiniBand, UCX chooses better than a name of an Ethernet interface would.
    assert not environment._has_rdma(tmp_path / "infiniband")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert environment._has_rdma(tmp_path / "infiniband")


def test_on_gpus_horovod_looks_around_as_often_as_it_likes() -> None:
    slot = assign([Offer(0, "h", "h", "10.0.0.1", "eth0")])[0]
    assert environment.cycle_variables(slot) == {"HOROVOD_CYCLE_TIME": "20"}
    assert "HOROVOD_CYCLE_TIME" not in variables(2, 0, {})  # its ranks have GPUs


def test_very_many_ranks_to_a_core_give_it_up_while_they_wait_in_mpi() -> None:
    slot = assign(Offer(task, "h", "h", "10.0.0.1", "eth0") for task in range(33))[0]
    assignment = Assignment(slot, "10.0.0.0:4711/secret", "10.0.0.0", 4712, controller="mpi")

    def yields(cores: int, user: dict[str, str]) -> str | None:
        found = environment.worker_variables(slot, assignment, cores, {}, user)
        return found.get("MPIR_CVAR_ENABLE_HEAVY_YIELD")

    assert yields(2, {}) == "1"
    assert yields(2, {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"}) == "0"
    assert yields(3, {}) is None


def test_one_rank_is_a_single_process_to_horovod() -> None:
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in variables(1, 0, {})


def test_the_cores_are_shared_among_the_ranks_of_a_host() -> None:
    assert variables(4, 0, {}, cores=8)["OMP_NUM_THREADS"] == "4"
    assert variables(4, 0, {}, cores=1)["TF_NUM_INTRAOP_THREADS"] == "1"


def test_the_user_wins_over_defaults_but_not_over_the_rank() -> None:
    user = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "ib0", "HOROVOD_GLOO_IFACE": "ib1"}
    found = variables(2, 1, user | {"HOROVOD_RANK": "9", "CUDA_VISIBLE_DEVICES": "5"})
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["NCCL_SOCKET_IFNAME"] == "ib0"
    assert found["HOROVOD_GLOO_IFACE"] == "ib1"
    assert found["HOROVOD_RANK"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"


def test_masking_shows_a_rank_its_own_gpus() -> None:
    offers = [Offer(task, "h", "h", "10.0.0.1", "eth0", host_gpus=("4", "6")) for task in range(2)]
    found = gpu.environment(assign(offers)[1], "mask")
    assert found["CUDA_VISIBLE_DEVICES"] == "6"
    assert found["HOROVOD_RUNNER_DEVICE"] == "0"


def test_cuda_visible_devices_is_read_as_cuda_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in [
        ("2,3", ("2", "3")),
        (" 0 , GPU-77 ", ("0", "GPU-77")),
        ("1,-1,2", ("1",)),
        ("", ()),
    ]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpu.visible_gpus() == expected
        offer = Offer(0, "h", "h", "10.0.0.1", "eth0", host_gpus=expected)
        # The user's own numbering stays: no order is set over it.
        assert "CUDA_DEVICE_ORDER" not in gpu.environment(assign([offer])[0], "current")


def test_gpus_are_listed_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA X, GPU-a'\necho '1, NVIDIA X, GPU-b'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu.visible_gpus() == ("0", "1")
    assert gpu.list_gpus()[1] == ("1", "NVIDIA X, GPU-b")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu.visible_gpus() == ()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_is_read(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert environment._cgroup_cores(tmp_path) == cores


def test_a_host_names_itself_the_same_way_twice_and_fit_for_a_path() -> None:
    assert host.host_id() == host.host_id()
    assert "/" not in host.host_id()


def test_the_way_to_a_peer_has_an_address_and_an_interface() -> None:
    address = host.address_towards("127.0.0.1")
    assert address == "127.0.0.1"
    assert host.interface_of(address) == "lo"
    with pytest.raises(LookupError, match=r"192\.0\.2\.77"):
        host.interface_of("192.0.2.77")


def test_a_held_port_is_given_to_nobody_but_a_server_that_allows_reuse() -> None:
    held = host.hold_port("127.0.0.1")
    port = held.getsockname()[1]
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    with (
        socket.create_server(("127.0.0.1", port)) as server,  # allows reuse, as torch's does
        socket.create_connection(("127.0.0.1", port)),
    ):
        accepted, _ = server.accept()
        accepted.close()
    held.close()
