"""The image in containers of a real Docker engine, with the options that hosts set."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import EngineError, required
from tests.engines import docker as engine
from tests.engines.docker import COMPOSE, IMAGE, Docker

pytestmark = [pytest.mark.places("docker"), pytest.mark.timeout(5400)]
HARDENED = ("--read-only", "--tmpfs=/tmp:noexec", "--cap-drop=ALL")
HARDENED = (*HARDENED, "--security-opt=no-new-privileges", "--memory=4g")
PROGRAMS = f"--volume={Path(__file__).with_name('programs.py')}:/programs.py:ro"
SPARK_HERE = "--env=SPARK_LOCAL_HOSTNAME=localhost"
WITH_SPARK = ("horovod-runner", "doctor", "--master=local[2]")


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    """The engine, with the image of this checkout."""
    with required(engine.running()) as docker:
        engine.digits_image(docker)
        yield docker


def in_container(docker: Docker, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a container to its end; `words` are options, the image is between them and a command."""
    return docker("run", "--rm", *words)


def examined(docker: Docker, *options: str) -> dict[str, dict[str, Any]]:
    """Let the doctor sum messages over two ranks without Spark and two with it; its findings."""
    done = in_container(docker, *options, IMAGE, *WITH_SPARK, "--json")
    assert done.stdout, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="none"),
        pytest.param(HARDENED, id="hardened"),
        pytest.param((*HARDENED, "--user=12345:12345"), id="hardened, user without a name"),
        pytest.param(("--user=1000660000:0", "--cap-drop=ALL"), id="OpenShift's user"),
        pytest.param(("--user=0:0",), id="root"),
        pytest.param(("--ipc=none",), id="no shared memory"),
        pytest.param(("--shm-size=1m",), id="small shared memory"),
        pytest.param(("--cpus=0.5", "--env=HOME=/nowhere"), id="half a CPU, no home"),
        pytest.param(("--network=host",), id="the host's network"),
        pytest.param(("--network=none", SPARK_HERE), id="no network"),
        pytest.param(("--hostname=my_host", SPARK_HERE), id="an underscore in the host's name"),
    ],
)
def test_all_works(docker: Docker, options: tuple[str, ...]) -> None:
    findings = examined(docker, *options)
    wrong = {name: each["detail"] for name, each in findings.items() if each["status"] == "wrong"}
    assert not wrong
    for name in ("two ranks with torch", "2 rank(s) on Spark"):
        assert findings[name]["detail"].startswith("reduced to 3 (one number, 64 KB, 64 MB)")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--network=none",), id="no network"),
        pytest.param(("--ulimit=nproc=64", "--user=4711"), id="64 processes"),
        pytest.param(("--hostname=my_host",), id="an underscore in the host's name"),
    ],
)
def test_ranks_without_spark_need_less(docker: Docker, options: tuple[str, ...]) -> None:
    done = in_container(docker, *options, IMAGE)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("Everything works.\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param(("--network=none",), "has no address, as with docker run", id="no network"),
        pytest.param(("--hostname=my_host",), "The host name my_host has a", id="underscore"),
        pytest.param(("--ulimit=nofile=256",), "may open 256 files", id="256 files"),
        pytest.param(
            ("--ulimit=nproc=64", "--user=4712"), "may be 64 processes", id="64 processes"
        ),
        pytest.param(
            ("--user=4713", "--entrypoint=horovod-runner"),
            "User 4713 has no entry in /etc/passwd",
            id="user without a name, without the entry point",
        ),
    ],
)
def test_an_option_that_keeps_spark_from_starting_is_named(
    docker: Docker, options: tuple[str, ...], told: str
) -> None:
    command = WITH_SPARK[1:] if "--entrypoint=horovod-runner" in options else WITH_SPARK
    done = in_container(docker, *options, IMAGE, *command)
    assert done.returncode == 1
    assert told in done.stdout


def test_a_file_system_without_a_writable_folder_is_told(docker: Docker) -> None:
    done = in_container(docker, "--read-only", IMAGE)
    assert done.returncode == 1
    assert "no file can be created in /tmp" in done.stderr
    assert "docker run --tmpfs /tmp" in done.stderr


def test_a_rank_that_is_killed_for_its_memory_is_told(docker: Docker) -> None:
    limits = ("--memory=2g", "--memory-swap=2g")
    command = ("horovod-runner", "run", "--np=-2", "/programs.py:use_memory")
    done = in_container(docker, *limits, PROGRAMS, IMAGE, *command)
    assert done.returncode == 128 + 9
    assert "killed by SIGKILL (the kernel's out-of-memory killer)" in done.stderr
    assert "of the container's 2.0 GiB were left" in done.stderr


def test_a_stopped_container_leaves_its_checkpoints(docker: Docker, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # the image's user writes there
    options = (PROGRAMS, f"--volume={tmp_path}:/checkpoints")
    command = ("horovod-runner", "run", "--np=-2", "--checkpoint-dir=/checkpoints")
    program = "/programs.py:train_on"
    name = docker("run", "--detach", *options, IMAGE, *command, program).stdout.strip()
    logs = [docker.client, "logs", "--follow", name]
    with subprocess.Popen(
        logs, env=docker.variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as shown:
        assert shown.stdout is not None
        said = next((line for line in shown.stdout if "step 3, weight 3" in line), "")
        assert said
        # The engine kills it if it has not ended by itself after so many seconds.
        stopped = docker("stop", "--time=120", name)
        assert stopped.returncode == 0
        shown.stdout.read()
    state = json.loads(docker("inspect", "--format={{json .State}}", name).stdout)
    assert state["ExitCode"] == 128 + 15
    resumed = in_container(docker, *options, IMAGE, *command, "--resume", program)
    assert resumed.returncode == 0, resumed.stderr
    step, _, weight = resumed.stdout.partition("step ")[2].partition(", weight ")
    assert int(step) == int(weight) > 3


def test_the_health_check_finds_the_image_healthy(docker: Docker) -> None:
    name = docker("run", "--detach", "--health-interval=1s", IMAGE, "sleep", "infinity")
    events = [docker.client, "events", f"--filter=container={name.stdout.strip()}"]
    events += ["--filter=event=health_status", "--since=1", "--format={{.Status}}"]
    with subprocess.Popen(
        events, env=docker.variables(), stdout=subprocess.PIPE, text=True
    ) as shown:
        assert shown.stdout is not None
        assert shown.stdout.readline().strip() == "health_status: healthy"
        shown.kill()


def test_compose_trains_on_a_cluster_of_containers(docker: Docker) -> None:
    compose = ("compose", f"--file={COMPOSE}")
    try:
        done = docker(*compose, "up", "--exit-code-from=digits")
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        assert "on 360 held-out digits" in done.stdout
    finally:
        docker(*compose, "down", "--volumes")


def test_the_image_for_gpus_works_on_cpus(docker: Docker) -> None:
    done = in_container(docker, *HARDENED, engine.cuda_image(docker), "horovod-runner", "doctor")
    assert done.returncode == 0, done.stdout
    assert re.search("Horovod for torch .*, built with gloo, nccl", done.stdout)


def test_the_image_is_for_cpus_or_the_build_says_which_index_to_name(docker: Docker) -> None:
    if engine.answers(engine.TORCH_INDEX):
        size = int(docker("image", "inspect", "--format={{.Size}}", IMAGE).stdout)
        assert size <= 2_250_000_000  # two tenths are scikit-learn and SciPy, for the digits
    else:
        with pytest.raises(EngineError, match=f"--build-arg TORCH_INDEX={engine.TORCH_INDEX}"):
            docker.build("cpu.Dockerfile", "horovod-runner:refused", {"TORCH_INDEX": ""})
