"""Slurm on two hosts: the launcher, and a program that srun itself starts on all ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.network import ADDRESSES, Host, Network, missing
from tests.hpc import PROGRAM, ROOT, require_slurm, slurm, start

pytestmark = [pytest.mark.horovod, pytest.mark.places("hosts")]
Command = Callable[..., subprocess.CompletedProcess[str]]
_SCRIPT = """
import horovod.torch as hvd, os, torch
import torch.distributed as dist
from tests.real.distributed_calls import different_results, missing_beyond_gloo
hvd.init()
for count in (1, 5_000, 40_000, 1_000_001):
    numbers = torch.arange(count)
    assert hvd.allreduce(numbers * (hvd.rank() + 1), op=hvd.Sum).equal(numbers * 10)
dist.init_process_group("hvd")
wrong = different_results(dist.new_group(backend="gloo")) + missing_beyond_gloo()
assert not wrong, wrong
dist.destroy_process_group()
total = hvd.allreduce(torch.ones(1) * (hvd.rank() + 1), op=hvd.Sum).item()
print("rank", hvd.rank(), "local", hvd.local_rank(), "of", hvd.local_size(), "on",
      os.uname().nodename, "by", os.environ["HOROVOD_GLOO_IFACE"], "sum", total)
"""


_SHRINKING = """
import os, subprocess, tempfile
from horovod_runner import ClusterConfig, HorovodRunner, commit, load_checkpoint

def main():
    import horovod.torch as hvd, torch
    hvd.init()
    loaded = load_checkpoint()
    sizes = [] if loaded is None else loaded.state["sizes"]
    while not sizes or sizes[-1] == 4 or len(sizes) < 10:
        hvd.allreduce(torch.ones(1), name="step")
        sizes.append(hvd.size())
        commit({"sizes": sizes}, len(sizes))
        if sizes[-1] == 4 and sizes.count(4) == 5 and hvd.rank() == 0:  # fewer may begin
            job = "JobId=" + os.environ["SLURM_JOB_ID"]
            shrink = ["scontrol", "update", job, "NodeList=host-a"]
            subprocess.run(shrink, cwd=tempfile.gettempdir(), check=True)
    return sorted({*sizes}), os.uname().nodename

runner = HorovodRunner(
    np=(2, 4), max_restarts=2, cluster_config=ClusterConfig(launcher="slurm"), progress=False
)
print("sizes", *runner.run(main))
"""

_WHERE = """
import os
of = {name: os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
print("rank {RANK} of {SIZE}, local {LOCAL_RANK} of {LOCAL_SIZE}, on".format(**of), os.uname()[1])
"""


def node(host: Host) -> slurm.Node:
    return slurm.Node(host.name, ADDRESSES[host.name], host.enter)


@contextmanager
def slurm_of(
    folders: pytest.TempPathFactory, workers: int, cpus: int
) -> Iterator[tuple[Network, dict[str, str]]]:
    """Slurm on some nodes and a login node, the network's driver; also its variables."""
    require_slurm()
    if reason := missing():
        pytest.skip(reason)
    with Network(folders.mktemp("network"), workers) as network:
        nodes = [*map(node, network.workers)]
        with slurm.running(
            folders.mktemp("slurm"), nodes, node(network.driver), cpus=cpus
        ) as environment:
            yield network, environment


@pytest.fixture(scope="module")
def on_login_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Runs a command on a login node, in an allocation of two other nodes."""
    # A node has two CPUs, and so two ranks, also once the other one has gone.
    with slurm_of(tmp_path_factory, workers=2, cpus=2) as (network, environment):

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            allocate = ("salloc", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
            # By default Open MPI also uses docker0, which leads to no other host.
            variables = {**environment, "OMPI_MCA_btl_tcp_if_include": "eth0"}
            return start(*network.driver.enter, *allocate, *command, **variables)

        yield run


def test_ranks_on_two_nodes_connect_and_reduce(on_login_node: Command, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    done = on_login_node("horovod-runner", "run", str(script))
    assert done.returncode == 0, done.stderr
    lines = sorted(
        re.findall(r"rank (\d) local (\d) of 2 on (\S+) by (\S+) sum (\S+)", done.stdout)
    )
    assert lines == [
        ("0", "0", "host-a", "eth0", "10.0"),
        ("1", "1", "host-a", "eth0", "10.0"),
        ("2", "0", "host-b", "eth0", "10.0"),
        ("3", "1", "host-b", "eth0", "10.0"),
    ]


# Slow: eight ranks with cold imports, over two ways to start them.
def test_one_rank_per_node_trains_on_the_rows_of_all_ranks(on_login_node: Command) -> None:
    done = on_login_node("horovod-runner", "run", PROGRAM, "--", "two-hosts")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": ok") == 4
    over_mpi = on_login_node("srun", "--mpi=pmix", sys.executable, PROGRAM, "two-hosts")
    assert over_mpi.returncode == 0, over_mpi.stderr
    assert over_mpi.stdout.count(": ok") == 4


# Slow: Slurm kills the steps of the host that goes, and the run waits until it is sure of that.
def test_a_run_goes_on_in_an_allocation_that_is_shrunk(
    on_login_node: Command, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SHRINKING)
    done = on_login_node(sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert re.search(r"sizes \[(2|3|2, 3), 4\] host-a", done.stdout)


# Slow: a Slurm of four nodes, and 16 ranks.
def test_the_job_of_the_examples_has_four_ranks_on_each_of_four_nodes(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "digits_script.py").write_text(_WHERE)
    with slurm_of(tmp_path_factory, workers=4, cpus=4) as (network, environment):
        batch = ("sbatch", "--wait", str(ROOT / "examples" / "train.sbatch"))
        variables = {**environment, "VENV": str(Path(sys.executable).parent.parent)}
        done = start(*network.driver.enter, *batch, directory=tmp_path, **variables)
    said = "".join(path.read_text() for path in tmp_path.glob("digits-*.out"))
    assert done.returncode == 0, done.stderr + said
    found = re.findall(r"rank (\d+) of 16, local (\d) of 4, on (\S+)", said)
    ranks = [(str(n), str(n % 4), f"host-{'abcd'[n // 4]}") for n in range(16)]
    assert sorted(found, key=lambda each: int(each[0])) == ranks
