"""What is installed on driver and hosts, and what does not fit."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from horovod_runner import LaunchError, __version__
from horovod_runner.software import choose_controller, compare, installed

HERE = {
    "python": "3.11.7",
    "horovod_runner": "0.1.0",
    "horovod": "0.28.1",
    "torch": "2.13.0+cpu",
    "numpy": "1.26.4",
    "cloudpickle": "3.1.0",
}
MAIN = b"...import horovod.torch as hvd, torch..."


def test_versions_are_those_that_importlib_knows() -> None:
    found = installed()
    assert found["horovod_runner"] == __version__
    for package in ("cloudpickle", "numpy", "torch"):
        assert found[package] == metadata.version(package)


def test_the_first_on_the_path_counts_and_missing_folders_do_not_matter(tmp_path: Path) -> None:
    for folder, name in [
        ("a", "torch-2.1.0.dist-info"),
        ("b", "torch-1.0.dist-info"),
        ("b", "tensorflow_cpu-2.21.0.dist-info"),
    ]:
        (tmp_path / folder / name).mkdir(parents=True)
    found = installed([str(tmp_path / part) for part in ("none", "a", "b")])
    assert found["torch"] == "2.1.0"
    assert found["tensorflow"] == "2.21.0"


def test_mpich_counts_where_horovod_was_built_with_it(tmp_path: Path) -> None:
    (tmp_path / "mpich-5.0.2.dist-info").mkdir()
    horovod = tmp_path / "horovod-0.28.1.dist-info"
    horovod.mkdir()
    assert "mpich" not in installed([str(tmp_path)])
    (horovod / "METADATA").write_text("Name: horovod\nRequires-Dist: packaging\n")
    assert "mpich" not in installed([str(tmp_path)])
    (horovod / "METADATA").write_text("Name: horovod\nRequires-Dist: mpich>=4\n")
    assert installed([str(tmp_path)])["mpich"] == "5.0.2"
    (tmp_path / "mpich-5.0.2.dist-info").rmdir()  # it was removed again
    assert "mpich" not in installed([str(tmp_path)])


def test_mpi_is_taken_where_all_hosts_have_one_and_the_same() -> None:
    own = {**HERE, "mpich": "5.0.2"}
    assert choose_controller("auto", {"a": own, "b": own}) == (
        "mpi",
        "controller: MPI (MPICH 5.0.2)",
    )
    assert choose_controller("mpi", {"a": own})[0] == "mpi"
    assert choose_controller("gloo", {"a": own}) == ("gloo", "controller: Gloo, as asked for")
    controller, why = choose_controller("auto", {"a": own, "b": HERE})
    assert controller == "gloo"
    assert "Horovod of b was not built with the mpich package: pip install mpich" in why
    controller, why = choose_controller("auto", {"a": own, "b": {**own, "mpich": "4.3.0"}})
    assert controller == "gloo"
    assert "5.0.2 on a, 4.3.0 on b" in why
    with pytest.raises(LaunchError, match=r"controller='mpi' cannot be had.*of b.*pip install"):
        choose_controller("mpi", {"a": own, "b": HERE})


def test_equal_hosts_need_no_word() -> None:
    assert compare(HERE, {"a": HERE, "b": HERE}, MAIN) == []


@pytest.mark.parametrize(
    ("package", "version", "told"),
    [
        ("python", "3.10.4", r"host b runs Python 3.10.4 and the driver 3.11.7.*PYSPARK_PYTHON"),
        ("horovod_runner", "0.2.0", r"host b has horovod_runner 0.2.0 and the driver 0.1.0"),
        ("horovod", "0.27.0", r"horovod: 0.28.1 on a, 0.27.0 on b.*horovod-runner install"),
    ],
)
def test_what_cannot_work_is_refused(package: str, version: str, told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        compare(HERE, {"a": HERE, "b": {**HERE, package: version}}, MAIN)


def test_another_patch_release_of_python_is_no_difference() -> None:
    assert compare(HERE, {"a": {**HERE, "python": "3.11.2"}}, MAIN) == []


@pytest.mark.parametrize(
    ("package", "version", "told"),
    [
        ("torch", "2.1.0", "different versions of torch: 2.13.0+cpu on a, 2.1.0 on b"),
        ("numpy", "2.4.6", "host b has numpy 2.4.6 and the driver 1.26.4"),
        ("cloudpickle", "2.2.1", "host b has cloudpickle 2.2.1"),
    ],
)
def test_what_may_not_work_is_warned_of(package: str, version: str, told: str) -> None:
    (warning,) = compare(HERE, {"a": HERE, "b": {**HERE, package: version}}, MAIN)
    assert told in warning


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("horovod", "horovod-runner install"), ("torch", "pip install torch==2.13.0")],
)
def test_a_host_that_lacks_what_main_names_is_told_with_the_command(
    package: str, remedy: str
) -> None:
    there = {name: version for name, version in HERE.items() if name != package}
    (warning,) = compare(HERE, {"a": there}, MAIN)
    assert warning.startswith(f"host a has no {package}")
    assert warning.endswith(remedy)
    assert compare(HERE, {"a": there}, b"print") == []
