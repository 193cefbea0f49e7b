"""A Docker engine of this machine's own: dockerd, compose, and the images of docker/.

python -m tests.engines.docker builds the image, keeps the engine up until Ctrl+C, and prints how to
use it. What it installs and builds stays in ~/.cache/horovod_runner/engines.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import CACHE, EngineError
from tests.engines.versions import DOCKER_COMPOSE

ROOT = Path(__file__).parents[2]
#: What the Dockerfiles begin with.
BASE = "python:3.11-slim-bookworm"
COMPOSE = ROOT / "docker" / "compose.yaml"
#: Of docker/cpu.Dockerfile, as docker/compose.yaml builds it.
IMAGE = "horovod-runner:digits"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_PACKAGES = ("docker.io", "debootstrap")
_PYTHON = "ca-certificates,netbase,python-is-python3,python3-dev,python3-venv,tzdata"
CUDA_IMAGE = "horovod-runner:cuda"
_DATA = CACHE / "docker-data"
_BROKEN = "broken"  # a file in that folder
_CACHED = "15GB"  # for the next build
# A toolkit as NVIDIA's image has it, from wheels: libraries there have names without a version.
_TOOLKIT = """
FROM {base}
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir --target /packages {wheels} \\
    && mv /packages/nvidia/cu* /usr/local/cuda && rm -r /packages /venv \\
    && cd /usr/local/cuda && ln -s lib lib64 \\
    && for file in lib/*.so.*; do ln -s "${{file#lib/}}" "${{file%%.so.*}}.so" || true; done
"""
_COMPOSE_MODULE = "github.com/docker/compose/v2"


@dataclass(frozen=True)
class Docker:
    """A running engine.

    Attributes:
        client: the docker command.
        environment: variables with which it reaches this engine.
    """

    client: str
    environment: Mapping[str, str]

    def __call__(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the client; its output is captured as text, and its exit code is not checked."""
        options = {"capture_output": True, "text": True, "env": self.variables(), **options}
        return subprocess.run([self.client, *words], check=False, **options)

    def variables(self) -> dict[str, str]:
        """The environment of a client's process."""
        return {**os.environ, **self.environment}

    def has(self, image: str) -> bool:
        """Whether the engine has an image."""
        return self("image", "inspect", image).returncode == 0

    def build(self, dockerfile: str, tag: str, arguments: Mapping[str, str]) -> str:
        """Build an image of docker/ and return its name; layers of an earlier build are reused.

        Raises:
            EngineError: a step failed; the last lines of its output are the message.
        """
        self.provide_base()
        words = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        # The host's network: a bridge may not reach the machine's resolver.
        done = self(
            "build", "--network=host", "--progress=plain", f"--tag={tag}", *words,
            f"--file={ROOT / 'docker' / dockerfile}", str(ROOT),
            capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise EngineError("\n".join(done.stdout.splitlines()[-40:]))
        return tag

    def provide_base(self) -> None:
        """Pull the base image; without a registry, make it of Debian's own Python 3.11."""
        if self.has(BASE) or self("pull", "--quiet", BASE).returncode == 0:
            return
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            root = Path(folder) / "root"
            words = ["debootstrap", "--variant=minbase", f"--include={_PYTHON}", "bookworm"]
            _run([*words, str(root), _debian_mirror()], "debootstrap")
            _behave_like_slim(root)
            with subprocess.Popen(
                ["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE
            ) as tar:
                done = self("import", "-", BASE, stdin=tar.stdout)
            if done.returncode:
                raise EngineError(f"docker import failed: {done.stderr}")


def cuda_image(docker: Docker) -> str:
    """Build the image for GPUs of this checkout, for one architecture, and return its name.

    Without a registry NVIDIA's image is made of its compiler's wheels.
    """
    (base,) = re.findall(r"FROM (nvidia/cuda:\S+)", (ROOT / "docker/cuda.Dockerfile").read_text())
    (version,) = re.findall(
        r"ARG CUDA_VERSION=(\S+)", (ROOT / "docker/cuda.Dockerfile").read_text()
    )
    base = base.replace("${CUDA_VERSION}", version)
    if not docker.has(base) and docker("pull", "--quiet", base).returncode:
        docker.provide_base()
        table = tomllib.loads((ROOT / "wheels" / "table.toml").read_text())
        wheels = " ".join(table["rows"]["torch-cuda"]["cuda"])
        text = _TOOLKIT.format(base=BASE, wheels=wheels)
        done = docker("build", "--network=host", f"--tag={base}", "-", input=text)
        if done.returncode:
            raise EngineError(f"Docker: no image in place of {base}: {done.stderr[-2000:]}")
    return docker.build("cuda.Dockerfile", CUDA_IMAGE, {"HOROVOD_BUILD_CUDA_CC_LIST": "90"})


def digits_image(docker: Docker) -> str:
    """Build the image for CPUs of this checkout and return its name.

    Where PyTorch's index of builds for CPUs cannot be reached, torch is the one of pip's index.
    """
    found = docker("compose", f"--file={COMPOSE}", "config", "--format=json")
    if found.returncode:
        raise EngineError(f"Docker: compose cannot read {COMPOSE}: {found.stderr.strip()}")
    arguments = dict(json.loads(found.stdout)["services"]["master"]["build"]["args"])
    if not answers(TORCH_INDEX):
        arguments |= {"TORCH_INDEX": "", "ALLOW_CUDA": "1"}
    return docker.build("cpu.Dockerfile", IMAGE, arguments)


@contextmanager
def running() -> Iterator[Docker]:
    """Start dockerd; its containers and itself are ended with the block, or with this process.

    Raises:
        EngineError: it cannot run here.
    """
    if os.geteuid() != 0:
        raise EngineError("Docker: dockerd must be started as root, and this is another user.")
    dockerd = _install()
    CACHE.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # Two engines must not use one data folder: a second session of tests waits for the first.
        lock = stack.enter_context((CACHE / "docker.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Not below the cache: the path of a socket has at most 107 characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="docker-")))
        # What containers with the host's network leave mounted there.
        stack.callback(_unmount, folder / "exec" / "netns" / "default")
        if (_DATA / _BROKEN).exists():
            shutil.rmtree(_DATA)
        _add_compose(folder)
        socket = f"unix://{folder}/docker.sock"
        command = [
            *("setpriv", "--pdeathsig", "TERM", dockerd, "--host", socket),
            *("--data-root", str(_DATA), "--exec-root", str(folder / "exec")),
            *("--pidfile", str(folder / "docker.pid")),
        ]
        environment = {
            "DOCKER_HOST": socket,
            "DOCKER_CONFIG": str(folder),
            "DOCKER_BUILDKIT": "1",
        }
        docker = Docker(_beside(dockerd, "docker"), environment)
        stack.callback(_restore_network, _forward_policy())
        daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.callback(_end, daemon)
        _await_start(daemon, folder / "dockerd.log")
        stack.callback(_clean, docker)
        yield docker


def _install() -> str:
    """The path of dockerd, installed by apt where it is missing."""
    if _find("dockerd") is None or _find("debootstrap") is None:
        subprocess.run([ROOT / ".ci" / "debian-packages", *_PACKAGES], check=False)
    found = _find("dockerd")
    if found is None:
        raise EngineError("Docker: dockerd is missing, and apt could not install docker.io.")
    return found


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"/usr/bin:/usr/sbin:/sbin:{os.environ['PATH']}")


def _beside(dockerd: str, name: str) -> str:
    """The client of the engine's own version: a machine may have another one on PATH."""
    for folder in (Path(dockerd).parent, Path("/usr/bin")):
        if (folder / name).exists():
            return str(folder / name)
    raise EngineError(f"Docker: there is {dockerd}, but no {name} beside it or in /usr/bin.")


def _add_compose(folder: Path) -> None:
    """Make `docker compose` of version 2 known to a client; built from its Go module once."""
    built = CACHE / f"docker-compose-{DOCKER_COMPOSE}" / "docker-compose"
    if not built.exists():
        _build_compose(built)
    plugins = folder / "cli-plugins"
    plugins.mkdir()
    (plugins / "docker-compose").symlink_to(built)


def _build_compose(built: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise EngineError("Docker: compose is built from its Go module, and go is not on PATH.")
    version = f"{_COMPOSE_MODULE}@v{DOCKER_COMPOSE}"
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        _run([go, "mod", "download", version], "go mod download", cwd=folder)
        modules = subprocess.check_output([go, "env", "GOMODCACHE"], text=True).strip()
        source = Path(folder) / "compose"
        # `go install` refuses a module with exclusions.
        shutil.copytree(Path(modules) / version, source, copy_function=shutil.copyfile)
        flags = f"-s -w -X {_COMPOSE_MODULE}/internal.Version=v{DOCKER_COMPOSE}"
        words = [
            "build",
            "-p",
            "1",
            "-trimpath",
            "-ldflags",
            flags,
            "-o",
            f"{folder}/done",
            "./cmd",
        ]
        environment = {**os.environ, "CGO_ENABLED": "0"}
        _run([go, *words], "go build", cwd=source, env=environment)
        Path(f"{folder}/done").rename(built)


def _run(words: Sequence[str], name: str, **options: Any) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise EngineError(f"Docker: {name} ended with exit code {done.returncode}: {''.join(last)}")


def _await_start(daemon: subprocess.Popen[str], log: Path) -> None:
    """Wait for dockerd's line that it listens; what it says later goes on into the log."""
    assert daemon.stderr is not None
    said = []
    for line in daemon.stderr:
        said.append(line)
        if "API listen on" in line:
            break
    else:
        raise EngineError(f"Docker: dockerd has ended: {''.join(said[-3:])}")

    def write() -> None:
        with log.open("w") as file, daemon.stderr as rest:  # type: ignore[union-attr]
            file.writelines(said)
            shutil.copyfileobj(rest, file)

    threading.Thread(target=write, daemon=True).start()


def _clean(docker: Docker) -> None:
    """Remove containers, and of the cache what the latest images were not built with."""
    found = docker("ps", "--all", "--quiet").stdout.split()
    if found:
        docker("rm", "--force", "--volumes", *found)
    docker("network", "prune", "--force")
    docker("image", "prune", "--force")
    pruned = docker("builder", "prune", "--force", f"--keep-storage={_CACHED}")
    if pruned.returncode:  # the cache of an engine that was killed once may be beyond repair
        (_DATA / _BROKEN).touch()


def _forward_policy() -> str:
    """What the kernel does with packets that it forwards; empty if another engine decides that."""
    if Path("/sys/class/net/docker0").exists():
        return ""
    first = subprocess.check_output(["iptables", "-S", "FORWARD"], text=True).splitlines()[0]
    return first.split()[-1]


def _restore_network(policy: str) -> None:
    """Remove the bridge and the rules that dockerd leaves: tests on other bridges need the old."""
    if not policy:
        return
    saved = subprocess.check_output(["iptables-save"], text=True).splitlines()
    rules = [line for line in saved if not re.search(r"DOCKER|\bdocker0\b|\bbr-[0-9a-f]{12}", line)]
    restored = "\n".join([*rules, ""])
    subprocess.run(["iptables-restore"], input=restored, text=True, check=True)
    subprocess.run(["iptables", "-P", "FORWARD", policy], check=True)
    subprocess.run(["ip", "link", "delete", "docker0"], check=False)


def _end(daemon: subprocess.Popen[str]) -> None:
    daemon.terminate()
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _unmount(path: Path) -> None:
    if path.is_mount():
        subprocess.run(["umount", path], check=True)


def answers(url: str) -> bool:
    """Whether a package index can be reached."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=20):
            return True
    except OSError:
        return False


def _debian_mirror() -> str:
    words = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    return found[0] if found else "http://deb.debian.org/debian"


def _behave_like_slim(root: Path) -> None:
    """Leave out manual pages, as Debian's slim images do; set up apt, pip and TLS as here."""
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(
        "path-exclude /usr/share/man/*\npath-exclude /usr/share/doc/*\n"
    )
    shutil.rmtree(root / "usr/share/man")
    (root / "usr/share/man").mkdir()
    for name in ("etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
        if Path("/", name).exists():
            shutil.copy(Path("/", name), root / name)
    shutil.copytree("/etc/apt/apt.conf.d", root / "etc/apt/apt.conf.d", dirs_exist_ok=True)


def main() -> int:
    """Build the image and keep the engine up."""
    # Both end the block below.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running() as docker:
            variables = " ".join(f"{name}={value}" for name, value in docker.environment.items())
            print(f"The engine is up. Building {IMAGE} ...", flush=True)
            digits_image(docker)
            print(f"Use it by: {variables} {docker.client} run --rm {IMAGE}", flush=True)
            print("Ctrl+C ends it.", flush=True)
            signal.pause()
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
