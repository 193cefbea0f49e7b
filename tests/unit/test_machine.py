"""What is measured of the machine under a rank, and how it is put together."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from msgspec import structs

from horovod_runner.host import counters, processes
from horovod_runner.host.control_groups import CpuTime
from horovod_runner.results.slowness.profile import RunProfile
from horovod_runner.task.machine import _throttled
from horovod_runner.wire.measurements import Machine
from tests.programs import ROOT, Program, run_python

# The processes of a rank.


def test_what_ended_processes_have_used_still_counts() -> None:
    script = """
        import os, sys
        kept = bytearray(b"x" * (50 << 20))
        for _ in range(2):  # each computes for 0.3 s and ends
            if not os.fork():
                while sum(os.times()[:2]) < 0.3:
                    pass
                os._exit(0)
        for _ in range(2):
            os.wait()
        if not os.fork():
            sys.stdin.read()
            os._exit(0)
        print("ready", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        parent, child = processes.family(process.pid)
        process.communicate("")
    assert parent.pid == process.pid
    assert parent.memory > 50 << 20
    assert parent.cpu >= 0.6
    assert child.pid != process.pid
    assert child.cpu < 0.3
    assert processes.family(process.pid) == []


def test_only_pages_from_a_disk_were_waited_for(tmp_path: Path) -> None:
    script = """
        import mmap, os, resource, sys
        def read_from_disk(name, pages):
            with open(name, "wb") as file:
                file.write(b"x" * (pages * mmap.PAGESIZE))
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with open(name, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                mapped.madvise(mmap.MADV_RANDOM)
                sum(mapped[:: mmap.PAGESIZE])
        if not os.fork():
            read_from_disk("child", 20)
            os._exit(0)
        os.wait()
        read_from_disk("parent", 80)
        kept = bytearray(b"x" * (50 << 20))
        whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        used = [resource.getrusage(each) for each in whose]
        print(sum(u.ru_majflt for u in used), flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with Program(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        from_disk = int(process.stdout.readline())
        faults = processes.use(process.pid).faults
        process.communicate("")
    assert from_disk <= faults < from_disk + 20  # Python's code may come from the disk, too


# The host.

CPUS = "sys/devices/system/cpu"
PRESSURE = """some avg10=2.04 avg60=0.75 avg300=0.40 total=157622151
full avg10=0.00 avg60=0.00 avg300=0.00 total=13000
"""


def test_counters_of_waiting_and_heat_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/pressure/cpu": PRESSURE,
        "proc/pressure/io": PRESSURE.replace("157622151", "2000000"),
        f"{CPUS}/cpu0/thermal_throttle/package_throttle_total_time_ms": "1500\n",
        f"{CPUS}/cpu0/cpufreq/scaling_cur_freq": "2000000\n",
        f"{CPUS}/cpu1/cpufreq/scaling_cur_freq": "3000000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    read = counters.read(tmp_path)
    assert (read.cpu_stall, read.memory_stall, read.io_stall) == (157.622151, 0.0, 2.0)
    assert read.hot == 1.5
    assert counters.frequency(tmp_path) == 2500.0


def test_busy_cores_are_counted_as_the_kernel_counts_them() -> None:
    before, start = counters.read(), time.monotonic()
    used = time.process_time()
    while time.process_time() - used < 0.3:
        pass
    busy = counters.read().busy - before.busy
    cores = os.cpu_count() or 1
    assert 0.25 <= busy <= (time.monotonic() - start + 0.1) * cores


@pytest.mark.parametrize(
    ("throttled", "used", "expected"),
    [
        (0.0, 5.0, 0.0),
        (3.5, 1.5, 3.5),  # one thread: what was measured of Linux with a quota of 30%
        (20.0, 10.0, 10 / 3),  # many threads, stopped on many cores: two thirds of the time
        (3.5, 0.0, 3.5),  # a kernel that does not tell the use
    ],
)
def test_a_quota_stops_a_container_for_a_part_of_the_time(
    throttled: float, used: float, expected: float
) -> None:
    before = CpuTime(100.0, 7.0)
    now = CpuTime(100.0 + used, 7.0 + throttled)
    assert _throttled(before, now, 5.0) == pytest.approx(expected)


# GPUs: NVIDIA's Python package with a library that answers like a driver with two devices.

NVML = r"""
#include <string.h>
typedef int Result;  /* 0 success, 3 not supported, 6 not found */
static int devices[2];
Result nvmlInit_v2(void) { return 0; }
Result nvmlInitWithFlags(unsigned flags) { return 0; }
Result nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
Result nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index > 1) return 2;
  *device = &devices[index];
  return 0;
}
static int index_of(void* device) { return (int)((int*)device - devices); }
Result nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  strncpy(uuid, index_of(device) ? "GPU-bbbb-1" : "GPU-aaaa-0", length);
  return 0;
}
Result nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  int index = strcmp(uuid, "GPU-bbbb-1") == 0;
  if (!index && strcmp(uuid, "GPU-aaaa-0")) return 6;
  *device = &devices[index];
  return 0;
}
struct Memory { unsigned long long total, free, used; };
Result nvmlDeviceGetMemoryInfo(void* device, struct Memory* memory) {
  memory->total = 80000;
  memory->used = 1000 * (1 + index_of(device));
  memory->free = memory->total - memory->used;
  return 0;
}
struct Utilization { unsigned gpu, memory; };
Result nvmlDeviceGetUtilizationRates(void* device, struct Utilization* rates) {
  rates->gpu = index_of(device) ? 90 : 30;
  return 0;
}
Result nvmlDeviceGetCurrentClocksEventReasons(void* device, unsigned long long* reasons) {
  *reasons = index_of(device) ? 0x40 : 0x4;  /* hot; at its power limit */
  return 0;
}
"""


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("0",), (1, 0.3, 1000, 80000, 0)),
        (("0", "GPU-bbbb-1"), (2, 0.6, 3000, 160000, 1)),
        (("GPU-bb",), (1, 0.9, 2000, 80000, 1)),  # CUDA accepts the beginning of a UUID
        (("7", "GPU-cccc", "MIG-1"), (0, 0.0, 0, 0, 0)),
        ((), (0, 0.0, 0, 0, 0)),
    ],
)
def test_gpus_are_read_by_nvml(
    gpus: tuple[str, ...], expected: tuple[float, ...], nvml: Path
) -> None:
    assert read_gpus(gpus, nvml) == str(tuple(expected))


def test_without_a_driver_no_gpu_is_read(tmp_path: Path) -> None:
    assert read_gpus(("0",), tmp_path) == "(0, 0.0, 0, 0, 0)"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library."""
    pytest.importorskip("pynvml")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def test_a_pynvml_that_lacks_a_function_measures_the_rest(nvml: Path) -> None:
    old = "import pynvml; del pynvml.nvmlDeviceGetCurrentClocksEventReasons\n"
    assert read_gpus(("0", "GPU-bbbb-1"), nvml, old) == "(2, 0.6, 3000, 160000, 0)"


def read_gpus(gpus: tuple[str, ...], libraries: Path, before: str = "") -> str:
    code = (
        f"{before}from horovod_runner.host.gpu_meter import GpuMeter\n"
        f"print(tuple(GpuMeter({gpus!r}).read()))"
    )
    variables = {"LD_LIBRARY_PATH": str(libraries)}
    return run_python(code, variables=variables, check=True, cwd=ROOT).stdout.strip()


# The ranks of a host.


def measured(rank: int, when: float, **fields: float) -> Machine:
    return structs.replace(Machine(rank, when, 5.0), **fields)


def test_ranks_have_the_counters_that_were_read_beside_the_first_one_of_their_host() -> None:
    profile = RunProfile()
    profile.begin(["a", "a", "b"])
    profile.add_machine(measured(1, 100.0, host_rank=0, own_cores=1.5))
    profile.add_machine(measured(0, 100.5, host_rank=0, own_cores=1.0, cores=7.5, swapped=9))
    profile.add_machine(measured(2, 100.5, host_rank=2, own_cores=2.0, cores=2.5))
    profile.add_machine(measured(1, 105.0, host_rank=0, own_cores=1.5))
    machines = profile.machines
    assert [machine.cores for machine in machines[1]] == [7.5, 7.5]
    assert [machine.swapped for machine in machines[1]] == [9, 9]
    assert [machine.own_cores for machine in machines[1]] == [1.5, 1.5]
    # What is neither of rank 0 nor of rank 1.
    assert [each[0].other_cores for each in machines.values()] == [5.0, 5.0, 0.5]
    table = profile.machine_table().to_pydict()
    assert table["rank"] == [0, 1, 1, 2]
    assert table["other_cores"] == [5.0, 5.0, 5.0, 0.5]
    assert RunProfile.restored(profile.saved()).machines == machines


def test_a_restarted_rank_does_not_get_the_counters_of_its_earlier_host() -> None:
    profile = RunProfile()
    profile.begin(["a", "b"])
    profile.add_machine(measured(0, 100.0, host_rank=0, cores=7.5))
    profile.begin(["b", "b"])
    profile.add_machine(measured(1, 160.0, host_rank=0))
    assert profile.machines[1][-1].cores == 0.0
    profile.add_machine(measured(0, 160.5, host_rank=0, cores=2.0))
    assert profile.machines[1][-1].cores == 2.0
