"""Versions of packages on driver and hosts, and which of them do not fit."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from horovod_runner import LaunchError, __version__
from horovod_runner.common.slots import Offer
from horovod_runner.host.software import (
    SharedMemory,
    choose_controller,
    compare,
    installed,
    without_nccl,
)

HERE = {
    "python": "3.11.7",
    "horovod_runner": "0.1.0",
    "horovod": "0.28.1",
    "torch": "2.13.0+cpu",
    "numpy": "1.26.4",
    "cloudpickle": "3.1.0",
}
MAIN = b"...import horovod.torch as hvd, torch..."


def test_versions_are_those_of_importlib_metadata() -> None:
    versions = installed()
    assert versions["horovod_runner"] == __version__
    for package in ("cloudpickle", "numpy", "torch"):
        assert versions[package] == metadata.version(package)


def test_the_first_folder_on_the_path_wins_and_missing_folders_are_skipped(tmp_path: Path) -> None:
    for folder, name in [
        ("a", "torch-2.1.0.dist-info"),
        ("b", "torch-1.0.dist-info"),
        ("b", "tensorflow_cpu-2.21.0.dist-info"),
    ]:
        (tmp_path / folder / name).mkdir(parents=True)
    versions = installed([str(tmp_path / part) for part in ("none", "a", "b")])
    assert versions["torch"] == "2.1.0"
    assert versions["tensorflow"] == "2.21.0"


@pytest.mark.parametrize(
    ("library", "has"), [(b"..ncclCommInitRank..", True), (b"..gloo..", False), (None, True)]
)
def test_a_horovod_for_torch_without_nccl_is_noted(
    library: bytes | None, has: bool, tmp_path: Path
) -> None:
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    if library is not None:
        (tmp_path / "horovod" / "torch").mkdir(parents=True)
        (tmp_path / "horovod" / "torch" / "mpi_lib_v2.cpython-313.so").write_bytes(library)
    here = installed([str(tmp_path)])
    assert without_nccl({"a": here, "b": HERE}, MAIN) == ([] if has else ["a"])
    # A main that names Horovod for TensorFlow, or none, needs no NCCL.
    for main in (b"import horovod.tensorflow as hvd", b"torch.distributed"):
        assert without_nccl({"a": here}, main) == []


@pytest.mark.parametrize(
    "main",
    [
        b"..import horovod.torch as hvd..",
        b"..horovod_runner.integrations.loops.prepare..",
        b"..horovod_runner.integrations.training.torch..",
    ],
)
def test_a_main_that_prepares_or_fits_with_torch_needs_nccl(main: bytes) -> None:
    assert without_nccl({"a": {"no_nccl": "horovod.torch"}}, main) == ["a"]


def test_mpich_counts_only_if_horovod_requires_it(tmp_path: Path) -> None:
    (tmp_path / "mpich-5.0.2.dist-info").mkdir()
    horovod = tmp_path / "horovod-0.28.1.dist-info"
    horovod.mkdir()
    assert "mpich" not in installed([str(tmp_path)])
    (horovod / "METADATA").write_text("Name: horovod\nRequires-Dist: packaging\n")
    assert "mpich" not in installed([str(tmp_path)])
    (horovod / "METADATA").write_text("Name: horovod\nRequires-Dist: mpich>=4\n")
    assert installed([str(tmp_path)])["mpich"] == "5.0.2"
    (tmp_path / "mpich-5.0.2.dist-info").rmdir()  # uninstalled later
    assert "mpich" not in installed([str(tmp_path)])


MPICH = {**HERE, "mpich": "5.0.2"}


def test_mpi_is_chosen_if_all_hosts_have_the_same_mpich() -> None:
    hosts = {"a": MPICH, "b": MPICH}
    memory = {"a": SharedMemory(64_000_000, 10), "b": SharedMemory(-1, 1000)}
    for wanted in ("auto", "mpi"):
        chosen = choose_controller(wanted, hosts, memory)  # type: ignore[arg-type]
        assert chosen == ("mpi", "controller: MPI (MPICH 5.0.2)")
    gloo = "gloo", "controller: Gloo (cpu_collectives='gloo')"
    assert choose_controller("gloo", hosts) == gloo


@pytest.mark.parametrize(
    ("b", "ranks", "why"),
    [
        (HERE, 1, "Horovod of b was not built with the mpich package: pip install mpich"),
        ({**MPICH, "mpich": "4.3.0"}, 1, "5.0.2 on a, 4.3.0 on b"),
        (
            {**MPICH, "no_shared_memory": "/dev/shm"},
            1,
            "host b cannot write to /dev/shm.*--shm-size",
        ),
        (
            MPICH,
            13,
            r"host a has 64\.0 MB free in /dev/shm, and for 13 ranks the buffers of MPI take .*"
            r"78\.0 MB.*--shm-size",
        ),
    ],
)
def test_without_mpi_on_a_host_gloo_is_chosen_and_the_reason_said(
    b: dict[str, str], ranks: int, why: str
) -> None:
    memory = {"a": SharedMemory(64_000_000, ranks), "b": SharedMemory(1 << 30, ranks)}
    controller, text = choose_controller("auto", {"a": MPICH, "b": b}, memory)
    assert controller == "gloo"
    assert re.search(why, text)
    with pytest.raises(LaunchError, match=rf"cpu_collectives='mpi' .*{why}"):
        choose_controller("mpi", {"a": MPICH, "b": b}, memory)


def test_mpi_is_chosen_on_a_host_that_does_not_tell_its_shared_memory() -> None:
    offer = Offer(0, "a", "a", "10.0.0.1", "eth0")
    memory = {"a": SharedMemory(offer.shared_memory, 64)}
    controller, _ = choose_controller("auto", {"a": MPICH}, memory)
    assert controller == "mpi"


def test_equal_hosts_and_other_patch_releases_of_python_give_no_warning() -> None:
    assert compare(HERE, {"a": HERE, "b": {**HERE, "python": "3.11.2"}}, MAIN) == []


@pytest.mark.parametrize(
    ("package", "version", "text"),
    [
        ("python", "3.10.4", r"host b .*Python 3.10.4 .* 3.11.7: .*PYSPARK_PYTHON"),
        ("horovod_runner", "0.2.0", r"host b .*horovod_runner 0.2.0 .* 0.1.0: "),
        ("horovod", "0.27.0", r"horovod: 0.28.1 on a, 0.27.0 on b.*horovod-runner install"),
    ],
)
def test_versions_that_cannot_work_together_are_an_error(
    package: str, version: str, text: str
) -> None:
    with pytest.raises(LaunchError, match=text):
        compare(HERE, {"a": HERE, "b": {**HERE, package: version}}, MAIN)


@pytest.mark.parametrize(
    ("package", "version", "text"),
    [
        ("torch", "2.1.0", "different versions of torch: 2.13.0+cpu on a, 2.1.0 on b"),
        ("numpy", "2.4.6", "host b has numpy 2.4.6 and the driver has numpy 1.26.4"),
        ("cloudpickle", "2.2.1", "host b has cloudpickle 2.2.1"),
    ],
)
def test_versions_that_may_not_work_together_give_a_warning(
    package: str, version: str, text: str
) -> None:
    (warning,) = compare(HERE, {"a": HERE, "b": {**HERE, package: version}}, MAIN)
    assert text in warning


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("horovod", "horovod-runner install"), ("torch", "pip install torch==2.13.0")],
)
def test_a_package_that_main_uses_and_a_host_lacks_gives_a_warning_with_the_command(
    package: str, remedy: str
) -> None:
    on_host = {name: version for name, version in HERE.items() if name != package}
    (warning,) = compare(HERE, {"a": on_host}, MAIN)
    assert warning.startswith(f"host a has no {package}")
    assert warning.endswith(remedy)
    assert compare(HERE, {"a": on_host}, b"print") == []


def test_hosts_that_lack_the_same_package_share_a_warning() -> None:
    without = {name: version for name, version in HERE.items() if name != "torch"}
    (warning,) = compare(HERE, {f"host{number}": without for number in range(64)}, MAIN)
    assert warning.startswith("hosts host0, host1, host2, host3 and 60 more have no torch, which")
