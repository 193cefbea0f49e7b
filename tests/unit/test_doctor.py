"""What `horovod-runner doctor` finds on machines that lack something, or have more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.host import gpus
from horovod_runner.tools import hello
from horovod_runner.tools.commands import doctor
from horovod_runner.tools.commands.doctor import DoctorFinding
from horovod_runner.tools.hello import Greeting, HelloError
from horovod_runner.tools.horovod_build import toolchain
from horovod_runner.tools.horovod_build.toolchain import Framework, Horovod, Tool

GLOO, NCCL = Horovod("0.28.1", ("gloo",)), Horovod("0.28.1", ("gloo", "nccl"))
CPU = Framework("torch", "2.13.0+cpu", horovod=GLOO)
CUDA = Framework("torch", "2.13.0", "13.0", horovod=NCCL)


def greetings(np: int, *totals: float) -> list[Greeting]:
    wrong = ("64 MB",)
    return [
        Greeting(rank, -np, rank, "host", total, "cpu", () if total == 3 else wrong)
        for rank, total in enumerate(totals)
    ]


@dataclass
class Machine:
    """What the machine has. By default torch, and none of what is optional for a run."""

    patch: pytest.MonkeyPatch
    frameworks: Sequence[Framework] = (CPU,)
    devices: Sequence[str] = ()
    installed: Sequence[str] = ("horovod",)
    java: Tool | None = None
    srun: Tool | None = None
    said: Any = None  # what two ranks said

    def examine(self) -> dict[str, DoctorFinding]:
        def say_hello(framework: str, np: int, spark: Any = None) -> list[Greeting]:
            if isinstance(self.said, Exception):
                raise self.said
            return greetings(np, *(self.said or (3, 3)))

        listed = [(f"{number}", name) for number, name in enumerate(self.devices)]
        self.patch.setattr(hello, "hello", say_hello)
        self.patch.setattr(gpus, "list_gpus", lambda: listed)
        self.patch.setattr(gpus, "visible_gpus", lambda: tuple(name for name, _ in listed))
        for name, value in {
            "find_java": self.java,
            "find_nccl": None,
            "find_system_mpi": None,
            "find_mpich": None,
        }.items():
            self.patch.setattr(toolchain, name, lambda value=value: value)
        self.patch.setattr(toolchain, "find_tool", lambda _: self.srun)
        self.patch.setattr(toolchain, "find_frameworks", lambda *_, **__: list(self.frameworks))
        self.patch.setattr(
            toolchain,
            "distribution_version",
            lambda name: "1.0" if name in self.installed else None,
        )
        return {each.name: each for each in doctor.examine()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "metadata.json").write_text('{"pytorch": "2.12.0", "tensorflow": "2"}')
    horovod = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "horovod", horovod)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    return Machine(monkeypatch)


def wrong(found: dict[str, DoctorFinding]) -> list[str]:
    return [name for name, each in found.items() if each.status == "wrong"]


def test_a_small_machine_is_enough(machine: Machine) -> None:
    found = machine.examine()
    assert wrong(found) == []
    absent = ["Java", "pyspark", "tensorflow", "GPUs", "NCCL", "MPI", "Slurm"]
    assert {found[name].status for name in absent} == {"absent"}
    assert found["torch"].detail == "2.13.0+cpu (CPU build)"
    assert found["Horovod for torch"].detail == "0.28.1, built with gloo against torch 2.12.0"
    assert found["two ranks with torch"].detail == (
        "reduced to 3 (one number, 64 KB, 64 MB): rank 0 of 2, local 0 on host (cpu); "
        "rank 1 of 2, local 1 on host (cpu)"
    )
    assert "a GPU with torch" not in found


def test_a_machine_with_gpus_has_one_tried(machine: Machine) -> None:
    machine.frameworks, machine.devices = (CUDA,), ("H100", "H200")
    machine.said = (3,)
    found = machine.examine()
    assert found["GPUs"].detail == "2"
    assert [found[f"GPU {number}"].detail for number in (0, 1)] == ["H100", "H200"]
    assert "a GPU with torch" in found
    assert "NCCL in Horovod for torch" not in found


@pytest.mark.parametrize(
    ("changes", "name", "detail", "advice"),
    [
        ({"installed": ["horovod", "pyspark"]}, "Java", "Spark needs it", "install Java 17"),
        ({"installed": []}, "Horovod", "not installed", "run: horovod-runner install"),
        ({"frameworks": ()}, "frameworks", "neither torch nor TensorFlow", "pip install torch"),
        (
            {
                "devices": ("H100",),
                "frameworks": (Framework("torch", "2.13.0", error="no libcudart"),),
            },
            "torch",
            "2.13.0 cannot be imported: no libcudart",
            "pip install --force-reinstall torch",
        ),
        ({"devices": ("H100",)}, "CUDA", "no framework here is a CUDA build", "install a CUDA"),
        (
            {"devices": ("H100",), "frameworks": (Framework("torch", "2", "13.0", horovod=GLOO),)},
            "NCCL in Horovod for torch",
            "built without NCCL: a collective of tensors on a GPU aborts the rank",
            "install --gpu --rebuild",
        ),
        (
            {
                "devices": ("H100",),
                "frameworks": (Framework("tensorflow", "2", "13.0", horovod=GLOO),),
            },
            "NCCL in Horovod for tensorflow",
            "built without NCCL: reductions go over the CPU",
            "install --gpu --rebuild",
        ),
        (
            {"frameworks": (Framework("torch", "2", horovod=Horovod(error="undefined symbol")),)},
            "Horovod for torch",
            "undefined symbol",
            "run: horovod-runner install --frameworks torch --rebuild",
        ),
        (
            {"said": (3, 4)},
            "two ranks with torch",
            "ranks [1] did not reduce 64 MB to 3: rank 0 of 2, local 0 on host (cpu); rank 1 of 2",
            "rebuild Horovod",
        ),
        (
            {"said": (2, 3)},
            "two ranks with torch",
            "ranks [0] did not reduce 64 MB to 3",
            "rebuild Horovod",
        ),
        (
            {"said": HelloError("hvd.init() failed")},
            "two ranks with torch",
            "hvd.init() failed",
            "Gloo may work",
        ),
        ({"said": KeyError()}, "two ranks with torch", "KeyError", "--json prints"),
    ],
)
def test_what_is_wrong_has_advice(
    changes: dict[str, Any], name: str, detail: str, advice: str, machine: Machine
) -> None:
    vars(machine).update(changes)
    found = machine.examine()
    assert wrong(found) == [name]
    assert detail in found[name].detail
    assert advice in found[name].advice


def test_a_java_home_without_java_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.installed = ["horovod", "pyspark"]
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    java = machine.examine()["Java"]
    assert java.detail == "JAVA_HOME=/nowhere has no bin/java that runs, and Spark needs it"
    assert java.advice.startswith("unset JAVA_HOME")
    monkeypatch.delenv("JAVA_HOME")
    java = machine.examine()["Java"]
    assert java.detail == "not found, and Spark needs it"
    assert java.advice.startswith("install Java 17")


def test_the_version_that_horovod_was_built_against_is_told_if_it_is_another(
    machine: Machine, tmp_path: Path
) -> None:
    plain = "0.28.1, built with gloo"
    machine.frameworks = (Framework("tensorflow", "2", horovod=GLOO),)
    assert machine.examine()["Horovod for tensorflow"].detail == plain
    machine.frameworks = (Framework("tensorflow", "3", horovod=GLOO),)
    found = machine.examine()
    assert found["Horovod for tensorflow"].detail == f"{plain} against tensorflow 2"
    for text in ("{}", "no JSON"):
        (tmp_path / "metadata.json").write_text(text)
        assert machine.examine()["Horovod for tensorflow"].detail == plain


def test_messages_have_the_sizes_that_are_told() -> None:
    sizes = {name: 4 * count for name, count in hello.COUNTS.items()}  # of floats
    assert sizes == {"one number": 4, "64 KB": 64 << 10, "64 MB": 64 << 20}


def test_the_place_in_slurm_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.srun = Tool("/usr/bin/srun", "25.05.1")
    assert machine.examine()["Slurm"].detail == "25.05.1 at /usr/bin/srun, in no allocation"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert machine.examine()["Slurm"].detail.endswith("srun, job 12 with ? task(s)")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert machine.examine()["Slurm"].detail.endswith("srun, job 12 with 4 task(s)")
    machine.srun = None
    found = machine.examine()
    assert wrong(found) == ["Slurm"]
    assert found["Slurm"].detail == "this is job 12, and srun is not on PATH"
