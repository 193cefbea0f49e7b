"""Versions of packages on driver and hosts, and which of them do not fit."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from horovod_runner import LaunchError, __version__
from horovod_runner.host.software import Memory, choose_controller, compare, installed

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


def test_mpi_is_chosen_if_all_hosts_have_the_same_mpich() -> None:
    with_mpich = {**HERE, "mpich": "5.0.2"}
    assert choose_controller("auto", {"a": with_mpich, "b": with_mpich}) == (
        "mpi",
        "controller: MPI (MPICH 5.0.2)",
    )
    assert choose_controller("mpi", {"a": with_mpich})[0] == "mpi"
    assert choose_controller("gloo", {"a": with_mpich}) == (
        "gloo",
        "controller: Gloo (cpu_collectives='gloo')",
    )
    controller, why = choose_controller("auto", {"a": with_mpich, "b": HERE})
    assert controller == "gloo"
    assert "Horovod of b was not built with the mpich package: pip install mpich" in why
    controller, why = choose_controller(
        "auto", {"a": with_mpich, "b": {**with_mpich, "mpich": "4.3.0"}}
    )
    assert controller == "gloo"
    assert "5.0.2 on a, 4.3.0 on b" in why
    no_memory = {**with_mpich, "no_shared_memory": "/dev/shm"}
    controller, why = choose_controller("auto", {"a": with_mpich, "b": no_memory})
    assert controller == "gloo"
    assert "host b cannot write to /dev/shm" in why
    assert "--shm-size" in why
    memory = {"a": Memory(64_000_000, 10), "b": Memory(-1, 1000)}
    assert choose_controller("auto", {"a": with_mpich, "b": with_mpich}, memory)[0] == "mpi"
    memory = {"a": Memory(64_000_000, 13), "b": Memory(1 << 30, 13)}
    controller, why = choose_controller("auto", {"a": with_mpich, "b": with_mpich}, memory)
    assert controller == "gloo"
    assert "host a has 64.0 MB free in /dev/shm, and for 13 ranks the buffers of MPI take" in why
    assert "78.0 MB" in why
    assert "--shm-size" in why
    with pytest.raises(LaunchError, match=r"cpu_collectives='mpi' .*64\.0 MB free in /dev/shm"):
        choose_controller("mpi", {"a": with_mpich, "b": with_mpich}, memory)
    with pytest.raises(LaunchError, match=r"cpu_collectives='mpi' .* b .*pip install mpich"):
        choose_controller("mpi", {"a": with_mpich, "b": HERE})


def test_equal_hosts_give_no_warning() -> None:
    assert compare(HERE, {"a": HERE, "b": HERE}, MAIN) == []


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


def test_another_patch_release_of_python_is_accepted() -> None:
    assert compare(HERE, {"a": {**HERE, "python": "3.11.2"}}, MAIN) == []


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
