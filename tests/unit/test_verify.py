"""`horovod-runner verify` without GPUs and frameworks: what figures mean, and how checks end.

The figures are such as machines with GPUs give. tests/real/test_verify.py runs the checks on CPUs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from horovod_runner import GpuError
from horovod_runner.host.processes import wait_for_end
from horovod_runner.results import saved_run
from horovod_runner.results.run import Run
from horovod_runner.tools.commands import cli
from horovod_runner.tools.horovod_build.toolchain import Framework, Horovod
from horovod_runner.tools.verify import machine, registry, report, session
from horovod_runner.tools.verify.check import Needs, VerifyCase, VerifyCheck, VerifyReading, missing
from horovod_runner.tools.verify.checks import (
    bandwidth,
    build,
    failures,
    feed,
    keras_training,
    placement,
    profile,
    sharded,
    training,
)
from horovod_runner.tools.verify.checks.build import Reduced
from horovod_runner.tools.verify.checks.failures import FailedRun
from horovod_runner.tools.verify.checks.feed import Fed
from horovod_runner.tools.verify.checks.keras_training import KerasFit
from horovod_runner.tools.verify.checks.placement import Device, Expected
from horovod_runner.tools.verify.checks.sharded import Sharded
from horovod_runner.tools.verify.checks.training import TrainedRank
from horovod_runner.tools.verify.machine import Gpu, ThisMachine
from horovod_runner.wire.measurements import Machine as Measured
from tests.made_up_runs import keep
from tests.programs import await_condition, script
from tests.unit import verify_checks
from tests.web import PageReader

DOCS = Path(__file__).parents[2] / "docs"
GIB = 1 << 30
UUIDS = ("GPU-3f2a0001-aaaa", "GPU-3f2a0002-bbbb")
GPUS = tuple(Gpu(f"{n}", uuid, "NVIDIA H100") for n, uuid in enumerate(UUIDS))
NCCL = Horovod("0.28.1", ("gloo", "mpi", "nccl", "cuda"))
TORCH = Framework("torch", "2.13.0", "13.0", horovod=NCCL)
TENSORFLOW = Framework("tensorflow", "2.21.0", "12.5", horovod=Horovod("0.28.1", ("gloo",)))
TWO_GPUS = ThisMachine(GPUS, (TORCH, TENSORFLOW), ("keras", "pyarrow"), "2.29.7", "host-a", 16)
CPU_TORCH = replace(TORCH, version="2.13.0+cpu", cuda=None, horovod=Horovod("0.28.1", ("gloo",)))
NO_GPU = ThisMachine((), (CPU_TORCH,), (), "", "laptop", 2)


def verdicts(readings: Sequence[VerifyReading]) -> list[bool | None]:
    return [reading.ok for reading in readings]


# What a machine has.


def _listing_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make nvidia-smi list two GPUs."""
    lines = "\n".join(f"{gpu.device}, {gpu.name}, {gpu.uuid}" for gpu in GPUS)
    script(folder / "nvidia-smi", f"cat <<END\n{lines}\nEND")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, [("0", UUIDS[0]), ("1", UUIDS[1])]),
        ("1", [("1", UUIDS[1])]),
        (f"{UUIDS[1]},0", [(UUIDS[1], UUIDS[1]), ("0", UUIDS[0])]),
        ("GPU-3f2a0002", [("GPU-3f2a0002", UUIDS[1])]),
        ("MIG-77", [("MIG-77", "")]),
        ("", []),
    ],
)
def test_the_visible_gpus_have_names_and_uuids(
    shown: str | None,
    expected: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _listing_gpus(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [(gpu.device, gpu.uuid) for gpu in machine.visible()] == expected


def test_some_gpus_are_shown_by_a_variable_and_all_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for count, shown in ((None, None), (2, None), (1, "0"), (0, "")):
        used = machine.first(GPUS, count)
        variables = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
        assert machine.environment(used, GPUS) == {**order, **variables}
    assert machine.environment((), ())["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert machine.environment(GPUS, GPUS) == {}
    for count in (3, -1):
        with pytest.raises(GpuError, match=f"--gpus {count}: .* 2 GPUs"):
            machine.first(GPUS, count)


@pytest.mark.parametrize(
    ("needs", "on", "reason"),
    [
        (Needs(), NO_GPU, ""),
        (Needs(gpus=1), NO_GPU, "needs 1 GPU, and no GPUs can be used"),
        (Needs(several=True), NO_GPU, ""),
        (Needs(gpus=2), TWO_GPUS, ""),
        (Needs(gpus=4), TWO_GPUS, "needs 4 GPUs, and 2 GPUs can be used"),
        (Needs(several=True), TWO_GPUS, ""),
        (
            Needs(several=True),
            ThisMachine(GPUS[:1], (TORCH,)),
            "needs two GPUs, and 1 GPU can be used",
        ),
        (Needs(packages=("pyarrow",)), NO_GPU, "pip install 'horovod_runner[data]'"),
        (Needs(packages=("pyarrow",)), TWO_GPUS, ""),
        (Needs(frameworks=("tensorflow",)), NO_GPU, "tensorflow is not installed"),
        (Needs(frameworks=("tensorflow",)), TWO_GPUS, ""),
        (Needs(1, frameworks=("tensorflow",)), TWO_GPUS, "was built without NCCL"),
        (Needs(gpus=1), ThisMachine(GPUS, (CPU_TORCH,)), "torch 2.13.0+cpu is a CPU build"),
        (Needs(), ThisMachine((), (replace(TORCH, error="no symbol"),)), "imported: no symbol"),
        (Needs(), ThisMachine((), (replace(TORCH, horovod=None),)), "Horovod for torch is not"),
    ],
)
def test_a_check_is_skipped_for_what_is_missing(needs: Needs, on: ThisMachine, reason: str) -> None:
    found = missing(needs, on)
    assert reason in found
    assert bool(reason) == bool(found)


def test_frameworks_train_on_gpus_only_where_horovod_has_nccl() -> None:
    case = VerifyCase(TWO_GPUS, False, "")
    assert case.on_gpus()
    assert not case.on_gpus("tensorflow")
    assert case.judges_speed
    assert not VerifyCase(TWO_GPUS, True, "").judges_speed
    assert not VerifyCase(NO_GPU, False, "").judges_speed
    three = ThisMachine((*GPUS, Gpu("2")), TWO_GPUS.frameworks)
    assert (
        VerifyCase(three, False, "").ranks(),
        VerifyCase(three, False, "").ranks("tensorflow"),
    ) == (3, 2)
    assert case.runner(2).options.gpus_per_rank is None
    assert case.runner(2, gpus_per_rank=0.5).options.gpus_per_rank == 0.5
    assert case.runner(2, "tensorflow").options.gpus_per_rank == 0
    assert case.runner(2, gpu_pinning="mask").options.cluster_config.gpu_pinning == "mask"


# What the figures of each check mean.


def test_a_build_without_nccl_fails_on_a_machine_with_gpus_alone() -> None:
    good = build.read_libraries(TWO_GPUS)
    assert [reading.ok for reading in good] == [True, None, True, None, None, None]
    assert good[2].seen == "torch"
    assert good[0].seen == "0.28.1 with gloo, mpi, nccl, cuda (torch 2.13.0, CUDA 13.0)"
    bad = build.read_libraries(ThisMachine(GPUS, (CPU_TORCH, TENSORFLOW)))
    assert bad[2].seen == "none: horovod-runner install --gpu --rebuild"
    assert bad[2].ok is False
    assert verdicts(build.read_libraries(NO_GPU)) == [True]
    assert verdicts(build.read_libraries(ThisMachine((), (TENSORFLOW,)))) == [True]
    broken = replace(CPU_TORCH, horovod=Horovod(error="undefined symbol"))
    assert verdicts(build.read_libraries(ThisMachine((), (broken,)))) == [False]
    without = replace(CPU_TORCH, horovod=Horovod("0.28.1", ("gloo", "mpi"), backend="no Work.hpp"))
    _, backend = build.read_libraries(ThisMachine((), (without,)))
    assert (backend.seen, backend.ok) == ("missing: no Work.hpp", None)


def test_a_wrong_result_names_the_collective_and_the_rank() -> None:
    right = [Reduced("sum", True, "cuda"), Reduced("average", True, "cuda")]
    assert verdicts(build.read_reductions([right, right], "cuda")) == [True, True]
    wrong = [right[0], Reduced("average", False, "cpu")]
    readings = build.read_reductions([right, wrong], "cuda")
    assert verdicts(readings) == [False, False]
    assert readings[0].seen == "3 of 4; wrong: average on rank 1"
    assert readings[1].seen == "cpu, cuda"


@pytest.mark.parametrize(("sixth", "right"), [(1 / 6, True), (0.1666, False)])
def test_an_average_may_be_rounded(
    sixth: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def reduce(tensor: Any, *_: object, op: str = "", **__: object) -> Any:
        # As NCCL averages on six GPUs; the other results do not matter here.
        return sum((tensor + rank) * sixth for rank in range(6)) if op == "Average" else tensor

    collectives = (
        *("allreduce", "allreduce_", "grouped_allreduce", "broadcast", "allgather"),
        *("alltoall", "reducescatter"),
    )
    hvd = SimpleNamespace(init=lambda: None, size=lambda: 6, rank=lambda: 0)
    vars(hvd).update(dict.fromkeys(collectives, reduce), Sum="", Max="", Average="Average")
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    found = {each.name: each.right for each in build.collectives(1)}
    assert found["average"] is right


def devices(*current: int, gpus: int = 2, uuids: Sequence[str] = UUIDS) -> list[Device]:
    bare = [uuid.removeprefix("GPU-").upper() for uuid in uuids]
    return [Device(n, False, gpus, c, bare[n], 3.0) for n, c in enumerate(current)]


def test_each_rank_has_to_use_its_own_gpu() -> None:
    expected = [Expected(2, 0, UUIDS[0]), Expected(2, 1, UUIDS[1])]
    assert set(verdicts(placement.read_devices(devices(0, 1), expected))) == {True}
    assert False in verdicts(placement.read_devices(devices(0, 0), expected))
    assert False in verdicts(placement.read_devices(devices(0, 1, gpus=1), expected))
    turned = placement.read_devices(devices(0, 1, uuids=UUIDS[::-1]), expected)
    assert [reading.name for reading in turned if reading.ok is False] == [
        "UUID of each rank's device"
    ]
    early = [device._replace(early=True) for device in devices(0, 1)]
    assert verdicts(placement.read_devices(early, expected)).count(False) == 1
    alone = [device._replace(total=1.0) for device in devices(0, 1)]
    assert verdicts(placement.read_devices(alone, expected)).count(False) == 1
    # UUIDs that are not known are not compared.
    unknown = [device._replace(uuid="") for device in devices(0, 1)]
    assert len(placement.read_devices(unknown, expected)) == 4
    nameless = [each._replace(uuid="") for each in expected]
    assert len(placement.read_devices(devices(0, 1), nameless)) == 4


PRINTED = """# nThread 1 nGpus 2 minBytes 1048576 maxBytes 268435456 step: 2(factor)
#                                         out-of-place                 in-place
#     size     count   type redop root    time  algbw  busbw #wrong   time  algbw  busbw #wrong
#      (B) (elements)                     (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
   1048576    262144  float   sum   -1   25.31  41.43  41.43    0    24.90  42.11  42.10    0
 268435456  67108864  float   sum   -1  1180.2 227.45 227.45  N/A   1175.9 228.28 228.27  N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 134.81
"""


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # nccl-tests: 268,435,456 bytes in 1,175.9 us on two GPUs are 228.28 GB/s, and as much on the
    # bus; with eight GPUs the factor is 7/4.
    assert bandwidth.bus_bandwidth(256 << 20, 1175.9e-6, 2) == pytest.approx(228.28, abs=0.01)
    assert bandwidth.bus_bandwidth(256 << 20, 1175.9e-6, 8) == pytest.approx(399.49, abs=0.01)
    assert bandwidth.read_program(PRINTED) == {1 << 20: 42.10, 256 << 20: 228.27}
    assert bandwidth.read_program("no CUDA-capable device is detected") == {}


def test_nccl_tests_are_found_and_compared_with(tmp_path: Path) -> None:
    program = tmp_path / "build" / bandwidth.PROGRAM
    script(program, f'echo "$@" > {tmp_path}/given; cat <<END\n{PRINTED}\nEND')
    assert bandwidth.find_program({"NCCL_TESTS_HOME": str(tmp_path), "PATH": ""}) == program
    assert bandwidth.find_program({"PATH": str(program.parent)}) == program
    assert bandwidth.find_program({"PATH": str(tmp_path)}) is None
    size = 256 << 20
    good = bandwidth.run_program(program, 2, size, 200.0, judge=True)
    assert (tmp_path / "given").read_text().split() == ["-b", f"{size}", "-e", f"{size}", "-g", "2"]
    assert (good.ok, good.seen.split()[0]) == (True, "0.88")
    assert bandwidth.run_program(program, 2, size, 100.0, judge=True).ok is False
    assert bandwidth.run_program(program, 2, size, 100.0, judge=False).ok is None
    script(program, "echo 'Test CUDA failure: no device' >&2; exit 2")
    reading = bandwidth.run_program(program, 2, 1 << 20, 1.0, judge=True)
    assert (reading.ok, reading.expected) == (None, "")
    assert reading.seen.endswith("exit code 2: Test CUDA failure: no device")


def test_only_the_largest_allreduce_is_judged() -> None:
    def times(slower: float) -> list[bandwidth.AllreduceTimes]:
        theirs = {1 << 20: 25e-6, 256 << 20: 1.2e-3}
        ours = {1 << 20: 250e-6, 256 << 20: 1.2e-3 * slower}
        return [{"Horovod": ours, "torch.distributed": theirs}] * 2

    assert verdicts(bandwidth.read_times(times(1.1), judge=True)) == [None, True]
    assert verdicts(bandwidth.read_times(times(1.5), judge=True)) == [None, False]
    small, large = bandwidth.read_times(times(1.5), judge=False)
    assert (small.ok, large.ok) == (None, None)
    assert small.seen.startswith("0.10 (Horovod 4.19 GB/s bus bandwidth, 0.25 ms; ")


def trained(ours: float, loss: float = 6.9, spread: float = 0.0) -> TrainedRank:
    losses = {"Horovod": (loss, 6.5), "plain PyTorch": (6.9, 6.5)}
    return TrainedRank({"Horovod": ours, "plain PyTorch": 0.04}, losses, spread)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (trained(0.0405), [True, True, True, True]),
        (trained(0.05), [False, True, True, True]),
        (trained(0.04, loss=7.2), [True, False, True, True]),
        (trained(0.04, spread=1e-6), [True, True, True, False]),
    ],
)
def test_a_training_is_compared_with_its_peer(result: TrainedRank, expected: list[bool]) -> None:
    size = training.TrainingSize(64, 32, 224, 10, 6)
    readings = training.read_training([result], size, "plain PyTorch", judge=True)
    assert verdicts(readings) == expected
    unjudged = training.read_training([result], size, "plain PyTorch", judge=False)
    assert verdicts(unjudged) == [None, *expected[1:]]
    several = training.read_training([result] * 4, size, "plain PyTorch", judge=True)
    assert f"Horovod {4 * 32 / result.seconds['Horovod']:,.4g} images/s" in several[0].seen


PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"


def fed(rank: int, **changes: object) -> Fed:
    rows = list(range(rank, 64, 2))
    return Fed({f"cuda:{rank}"}, 0, rows, {PINNED: 8}, 0.0105, 0.01)._replace(**changes)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, None),
        ({"devices": {"cpu"}}, 0),
        ({"wrong": 3}, 1),
        ({"rows": [0]}, 2),
        ({"copies": {PAGEABLE: 8}}, 3),
        ({"copies": {PINNED: 8, PAGEABLE: 1}}, 3),
        ({"copies": {}}, 3),  # torch's profiler saw none: not judged
        ({"fed": 0.02}, 4),
    ],
)
def test_batches_have_to_be_right_pinned_and_in_time(
    change: dict[str, object], wrong: int | None
) -> None:
    results = [fed(0, **change), fed(1, **change)]
    readings = feed.read_feed(results, feed.FeedSize(64, 48, 16), on_gpus=True, judge=True)
    assert [n for n, r in enumerate(readings) if not r.ok] == ([] if wrong is None else [wrong])
    if wrong == 3:
        assert readings[3].ok is (None if change == {"copies": {}} else False)


def test_memory_that_a_failed_run_keeps_is_found() -> None:
    used = [{UUIDS[0]: 4 << 20}, {UUIDS[0]: 2 * GIB}, {UUIDS[0]: 5 << 20}]
    good = FailedRun("killed", "RankFailedError", 0, *used)
    assert verdicts(failures.read_failure(good, on_gpus=True)) == [True] * 3
    kept = good._replace(after={UUIDS[0]: GIB})
    assert verdicts(failures.read_failure(kept, on_gpus=True)) == [True, True, False]
    left = good._replace(processes=1, error="HangError: no progress")
    assert verdicts(failures.read_failure(left, on_gpus=False)) == [False, False]
    unknown = good._replace(before={}, during={}, after={})
    assert verdicts(failures.read_failure(unknown, on_gpus=True)) == [True, True, None]
    told = [f"{UUIDS[0]}, 1536", f"{UUIDS[1]}, [N/A]"]
    assert failures.read_used(told) == {UUIDS[0]: 1536 << 20}


def test_the_gpus_of_all_ranks_have_to_be_measured() -> None:
    def measured(rank: int, **changes: float) -> Measured:
        figures = {"gpus": 1, "gpu_busy": 0.9, "gpu_memory": GIB, "gpu_memory_limit": 80 * GIB}
        return Measured(rank, 0.0, 5.0, **{**figures, **changes})

    good = {0: [measured(0, gpu_busy=0.0), measured(0)], 1: [measured(1)]}
    assert verdicts(profile.read_machines(good, 2, measured=True)) == [True, True, True, None]
    idle = {**good, 1: [measured(1, gpu_busy=0.0)]}
    assert verdicts(profile.read_machines(idle, 2, measured=True)) == [True, False, True, None]
    nothing = profile.read_machines({0: good[0]}, 2, measured=True)
    assert nothing[0].ok is False
    assert verdicts(profile.read_machines({}, 2, measured=True))[:3] == [False, False, False]
    assert verdicts(profile.read_machines({}, 2, measured=False)) == [None]


FITTED = KerasFit("torch", "GPU", [1.0, 0.5, 0.1], [0.5, -0.25])
SHARDED = Sharded("cuda", 50, 100, [1.0, 0.5], [1.0, 0.5002])
KERNEL, OPERATION = '{"ph": "X", "cat": "kernel"}', '{"ph": "X", "cat": "cpu_op"}'
SIZE = feed.FeedSize(64, 48, 16)
ON_CPUS = [fed(rank, devices={"cpu"}, copies={}) for rank in range(2)]


def fits(change: dict[str, Any]) -> list[VerifyReading]:
    """Two ranks, of which the second has other weights if these are changed."""
    second = FITTED if "weights" in change else FITTED._replace(**change)
    return keras_training.read_fits([FITTED._replace(**change), second], "torch", "GPU")


# What was seen, and what it is judged as.
JUDGED = [
    (build.carried_by, ['"NCCL_ALLREDUCE"'], {"on_gpus": True}, True),
    (build.carried_by, ['"MPI_ALLREDUCE"'], {"on_gpus": True}, False),
    (build.carried_by, ['"NCCL_ALLREDUCE", "GLOO_ALLREDUCE"'], {"on_gpus": True}, False),
    (build.carried_by, [""], {"on_gpus": True}, False),
    (build.carried_by, ['"GLOO_ALLREDUCE"'], {"on_gpus": False}, True),
    (build.carried_by, ['"NCCL_ALLREDUCE"'], {"on_gpus": False}, False),
    (build.carried_by, [""], {"on_gpus": False}, False),
    (placement.read_start, [["rank  host\nstart: warm"]], {}, True),
    (placement.read_start, [["rank  host\nstart: cold on rank 1 (an import)"]], {}, False),
    (placement.read_start, [[]], {}, False),
    (placement.read_refusal, [["ncclCommInitRank failed: invalid usage"] * 2], {}, True),
    (placement.read_refusal, [["", ""]], {}, True),
    (placement.read_refusal, [["ncclCommInitRank failed", ""]], {}, False),
    (placement.read_refusal, [["a sum of 1.0"] * 2], {}, False),
    (fits, [{}], {}, [True] * 4),
    (fits, [{"backend": "jax"}], {}, [False, True, True, True]),
    (fits, [{"device": "CPU"}], {}, [True, False, True, True]),
    (fits, [{"losses": [1.0, 0.6]}], {}, [True, True, False, True]),
    (fits, [{"weights": [0.5, 0.25]}], {}, [True, True, True, False]),
    (sharded.read_sharded, [[SHARDED] * 2, "cuda"], {}, [True] * 3),
    (sharded.read_sharded, [[SHARDED._replace(part=100)] * 2, "cuda"], {}, [True, False, True]),
    (
        sharded.read_sharded,
        [[SHARDED._replace(losses=[1.0, 0.51])] * 2, "cpu"],
        {},
        [False, True, False],
    ),
    (profile.read_traces, [{0: KERNEL, 1: KERNEL}, 2], {"on_gpus": True}, True),
    (profile.read_traces, [{0: KERNEL, 1: OPERATION}, 2], {"on_gpus": True}, False),
    (profile.read_traces, [{0: KERNEL}, 2], {"on_gpus": True}, False),
    (profile.read_traces, [{0: OPERATION, 1: OPERATION}, 2], {"on_gpus": False}, True),
    (feed.read_feed, [ON_CPUS, SIZE], {"on_gpus": False, "judge": False}, [True, True, True, None]),
]


@pytest.mark.parametrize(("read", "given", "options", "expected"), JUDGED)
def test_what_a_check_saw_is_judged(
    read: Callable[..., Any], given: list[Any], options: dict[str, Any], expected: Any
) -> None:
    readings = read(*given, **options)
    assert (verdicts(readings) if isinstance(readings, list) else readings.ok) == expected


def test_a_cold_start_says_why() -> None:
    cold = placement.read_start(["rank  host\nstart: cold on rank 1 (an import opened a GPU)"])
    assert cold.seen == "cold on rank 1 (an import opened a GPU)"


@pytest.mark.parametrize("device", ["cuda:1", "/replica:0/device:GPU:0", "cpu", "/device:CPU:0"])
def test_devices_of_both_backends_are_understood(device: str) -> None:
    weight = SimpleNamespace(value=SimpleNamespace(device=device))
    kind = keras_training.device_type(SimpleNamespace(weights=[weight]))
    assert kind == ("CPU" if "cpu" in device.lower() else "GPU")


# How checks run.


def run(*checks: VerifyCheck, **options: Any) -> list[session.CheckResult]:
    begun: list[str] = []
    start = time.monotonic()
    results = list(
        session.run(
            checks,
            TWO_GPUS,
            quick=True,
            variables={"CUDA_VISIBLE_DEVICES": "0,1"},
            begin=lambda each: begun.append(each.name),
            **options,
        )
    )
    assert sum(result.seconds for result in results) <= time.monotonic() - start
    assert begun == [result.name for result in results if result.status != "skipped"]
    return results


def test_a_check_that_fails_does_not_stop_the_others() -> None:
    names = ("wrong", "raising", "killed", "leaving", "silent", "passing")
    skipped = replace(verify_checks.passing, needs=Needs(gpus=9, frameworks=()))
    results = run(*(getattr(verify_checks, name) for name in names), skipped)
    assert [result.status for result in results] == ["failed"] * 5 + ["passed", "skipped"]
    reasons = {result.name: result.reason for result in results[:-1]}
    assert reasons == {
        "wrong": "",
        "raising": "ArithmeticError: a failure on purpose",
        "killed": "its process was ended by signal 9 (Killed)",
        "leaving": "its process ended with exit code 7",
        "silent": "",
        "passing": "",
    }
    wrong, raising, killed = results[:3]
    assert (verdicts(wrong.readings), wrong.output) == ([False, True], "shown")
    assert "in raising" in raising.output
    assert len(killed.readings) == 1
    assert results[5].output == ""
    assert results[6].reason == "needs 9 GPUs, and 2 GPUs can be used"


def test_the_runs_of_a_check_are_not_listed_among_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keep(Run("users", 1))
    (result,) = run(verify_checks.recording)
    assert verdicts(result.readings) == [True]
    assert [state.run_id for _, state in saved_run.summaries()] == ["users"]


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a hanging check writes when it hangs."""
    path = tmp_path / "hangs"
    monkeypatch.setenv("HANGS", str(path))
    return path


def test_a_check_that_takes_too_long_has_failed(sign: Path) -> None:
    (result,) = run(replace(verify_checks.hanging, limit=0.1))
    assert result.status == "failed"
    assert result.reason == "it was ended because it took longer than 0.1 s"


def until_it_hangs(process: subprocess.Popen[bytes], limit: float) -> bool:
    sign = Path(os.environ["HANGS"])
    await_condition(lambda: sign.exists() or process.poll() is not None)
    return process.poll() is not None


def test_a_check_that_hangs_is_interrupted(sign: Path) -> None:
    (result,) = run(verify_checks.hanging, wait=until_it_hangs)
    assert result.reason == "it was ended because it took longer than 60 s"
    assert verdicts(result.readings) == [True]
    assert sign.read_text() == "interrupted"


def test_a_check_that_does_not_end_is_killed_with_its_children(sign: Path) -> None:
    (result,) = run(verify_checks.stubborn, wait=until_it_hangs, patience=0.2)
    assert result.reason == "it was ended because it took longer than 60 s"
    with suppress(psutil.NoSuchProcess):
        # Its signal is on the way.
        assert wait_for_end([psutil.Process(int(sign.read_text()))], 100) == []


def test_each_check_is_about_a_heading_of_the_docs() -> None:
    names = [each.name for each in registry.CHECKS]
    assert len({*names}) == len(names)
    for each in registry.CHECKS:
        page, _, anchor = each.page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings}
        assert not anchor or anchor in anchors, each.name
    listed = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "howto" / "gpu.md").read_text(), re.MULTILINE)
    assert listed == names


# How results are shown.

GOOD = session.CheckResult(
    "current",
    "Each rank gets one GPU.",
    "howto/gpu.md#which-gpu-a-rank-gets",
    "passed",
    (VerifyReading("current device", "0, 1", "0, 1", True), VerifyReading("note", "an idle GPU")),
    seconds=4.2,
)
BAD = session.CheckResult(
    "feed",
    "Batches arrive in time.",
    "howto/gpu.md",
    "failed",
    (VerifyReading("ratio", "0.50 (20 ms; 10 ms)", "at least 0.8", False),),
    "it was ended because it took longer than 120 s",
    120.0,
    "<script>document.title='run'</script>",
)
SKIPPED = session.CheckResult(
    "order", "The order.", "howto/gpu.md", "skipped", reason="needs 2 GPUs"
)


def reported(*results: session.CheckResult, on: ThisMachine = TWO_GPUS) -> report.VerifyReport:
    return report.VerifyReport(on, results, 1.7e9, 130.0, False)


def test_a_terminal_shows_what_was_seen_beside_what_was_expected() -> None:
    assert report.lines(GOOD, 100) == [
        "passed   current  (4.2 s): Each rank gets one GPU.",
        "         ok    current device: 0, 1",
        "         -     note: an idle GPU",
    ]
    assert report.lines(BAD, 100) == [
        "failed   feed  (2 min): Batches arrive in time.",
        "         reason: it was ended because it took longer than 120 s",
        "         WRONG ratio: 0.50 (20 ms; 10 ms) [expected: at least 0.8]",
    ]
    assert report.lines(SKIPPED, 100) == [
        "skipped  order: The order.",
        "         why: needs 2 GPUs",
    ]
    narrow = report.lines(BAD, 60)
    assert all(len(line) <= 60 for line in narrow)
    assert narrow[-1] == "               least 0.8]"


def test_the_verdict_is_that_of_all_checks() -> None:
    whole = reported(GOOD, BAD, SKIPPED)
    assert whole.failed
    assert not reported(GOOD, SKIPPED).failed
    assert report.summary(whole) == "1 failed, 1 passed, 1 skipped in 2 min 10 s"
    assert report.machine_text(TWO_GPUS) == (
        "host-a: 2 x NVIDIA H100, 16 cores; torch 2.13.0 (CUDA 13.0); tensorflow 2.21.0 (CUDA 12.5)"
    )
    plain = json.loads(report.as_json(whole))
    assert plain["ok"] is False
    assert plain["results"][1]["readings"][0]["expected"] == "at least 0.8"
    assert plain["machine"]["gpus"][0]["uuid"] == UUIDS[0]


def test_the_page_is_whole_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.write_page(reported(GOOD, BAD, SKIPPED), path)
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    read = PageReader(text)
    assert [name for name, _ in read.ids] == ["feed", "current", "skipped"]
    assert read.links == ["data:,", "#current", "#feed", "#skipped"]
    assert "script" not in read.tags
    assert "script-src 'none'" in text.replace("&#x27;", "'")
    assert "&lt;script&gt;" in text
    for shown in ("at least 0.8", "not as expected", "needs 2 GPUs", "NVIDIA H100", "2.29.7"):
        assert shown in text


def test_the_command_lists_its_checks_and_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["verify", "--list", "--only", "mask, feed"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["mask", "feed"]
    assert cli.main(["verify", "--only", "speed"]) == 1
    assert "there is no check 'speed'; the checks are build, " in capsys.readouterr().err
    assert cli.main(["verify", "-o", str(tmp_path / "none" / "report.html")]) == 1
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    _listing_gpus(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cli.main(["verify", "--gpus", "3"]) == 1
    assert "--gpus 3: this process may use 2 GPUs" in capsys.readouterr().err
