"""Run a Dockerfile of this folder without a container engine: each stage is a chroot.

    sudo python3.11 docker/try_in_chroot.py docker/cpu.Dockerfile --work /var/tmp/images \
        --build-arg TORCH_INDEX= --then 'horovod-runner --version'

It makes a Debian root with debootstrap in place of ``python:3.11-slim-bookworm`` (Debian 12's own
Python is 3.11), runs every step of every stage, and then, as the last stage's user, its
HEALTHCHECK, two ranks that say hello, and what ``--then`` names. It proves the steps, not the
engine: stages are folders, and the network is this machine's. apt and pip ask the registries that
they ask here.

It takes root, a Debian 12 machine, ``debootstrap`` and util-linux's ``unshare``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHON_IMAGE = "python:3.11-slim-bookworm"
_PYTHON_PACKAGES = "ca-certificates,netbase,python-is-python3,python3-dev,python3-venv,tzdata"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HELLO = (
    "from horovod_runner.tools.commands.hello import hello; print(*hello({!r}, np=-2), sep=chr(10))"
)
# Said of an image as a whole; nothing is run for them.
_ONLY_METADATA = {"LABEL", "ENTRYPOINT", "CMD", "EXPOSE", "STOPSIGNAL"}
_STEPS = {"ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "HEALTHCHECK"}


class ImageError(Exception):
    """A Dockerfile cannot be read or one of its steps failed; the text says what to change."""


@dataclass(frozen=True)
class Step:
    """One instruction: ``RUN`` and what stands behind it, its lines joined."""

    name: str
    text: str


@dataclass(frozen=True)
class Stage:
    """What stands between two FROM lines.

    Attributes:
        name: what it is called behind AS, else its number.
        base: an image, or the name of an earlier stage.
        steps: in their order.
    """

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)


def parse(text: str, given: Mapping[str, str] | None = None) -> list[Stage]:
    """The stages of a Dockerfile.

    Args:
        text: the Dockerfile.
        given: build arguments, which win over the defaults of ARG.

    Raises:
        ImageError: it has an instruction that is not known here.
    """
    # Comments may stand between the lines of an instruction.
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in re.sub(r"\\\n", " ", kept).splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        step = Step(name.upper(), rest.strip())
        if step.name == "FROM":
            base, *alias = expand(step.text, arguments).split()
            stages.append(Stage(alias[1] if alias else str(len(stages)), base))
        elif step.name not in _STEPS | _ONLY_METADATA:
            raise ImageError(f"{name} is not known here: leave it out, or teach this script.")
        elif stages:
            stages[-1].steps.append(step)
        else:
            arguments |= argument(step.text, given or {}, {})
    return stages


def expand(text: str, values: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME}`` replaced, by nothing where they are unknown."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: values.get(m[1] or m[2], ""), text)


def argument(text: str, given: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The variable that an ARG line sets; empty if it has no value."""
    name, has_default, default = text.partition("=")
    if name in given:
        return {name: given[name]}
    return {name: " ".join(shlex.split(expand(default, known)))} if has_default else {}


def assignments(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """The variables that an ENV line sets."""
    return dict(word.split("=", 1) for word in shlex.split(expand(text, known)))


def health_command(text: str) -> list[str]:
    """The command of a HEALTHCHECK line, as an argument list."""
    command = text.partition("CMD")[2].strip()
    return json.loads(command) if command.startswith("[") else ["/bin/sh", "-c", command]


def allowed(ignore: str) -> list[str]:
    """What a .dockerignore lets through that excludes everything else.

    Raises:
        ImageError: it excludes things one by one.
    """
    lines = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    if "*" not in lines:
        raise ImageError(".dockerignore has no line '*': only lists of exceptions are known here.")
    return [line[1:] for line in lines if line.startswith("!")]


@dataclass
class Image:
    """A stage as far as it has been run.

    Attributes:
        root: its file system.
        environment: what ENV has set.
        arguments: what ARG has set; seen by RUN alone.
        folder: that of WORKDIR.
        user: that of USER, a number or two.
        health: the command of HEALTHCHECK.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    health: list[str] = field(default_factory=list)

    def home(self) -> str:
        """The user's home, from the image's own list of users."""
        for line in (self.root / "etc/passwd").read_text().splitlines():
            _, _, uid, _, _, home, _ = line.split(":")
            if uid == self.user.partition(":")[0]:
                return home
        return "/"


class Builder:
    """Runs the stages of a Dockerfile.

    Args:
        work: a folder for their roots.
        given: build arguments.
        images: roots that stand for images.
    """

    def __init__(self, work: Path, given: Mapping[str, str], images: Mapping[str, Path]):
        self._work = work
        self._given = given
        self._images = dict(images)
        self._done: dict[str, Image] = {}
        self._pip = pip_settings()
        self._context = work / "context"
        self._copy_context()

    def build(self, stages: Sequence[Stage]) -> Image:
        """Run all stages; returns the last.

        Raises:
            ImageError: a step failed.
        """
        for stage in stages:
            began = time.monotonic()
            print(f"== stage {stage.name} from {stage.base}", flush=True)
            image = self._begin(stage)
            for step in stage.steps:
                print(f"-- {step.name} {' '.join(step.text.split())[:90]}", flush=True)
                self._run_step(image, step)
            self._done[stage.name] = image
            print(f"== stage {stage.name}: {time.monotonic() - began:.0f} s", flush=True)
        return image

    def _begin(self, stage: Stage) -> Image:
        root = self._work / f"stage-{stage.name}"
        shutil.rmtree(root, ignore_errors=True)
        if stage.base == PYTHON_IMAGE and stage.base not in self._images:
            self._images[stage.base] = make_python_root(self._work / "python")
        earlier = self._done.get(stage.base)
        source = earlier.root if earlier else self._images.get(stage.base)
        if source is None:
            raise ImageError(
                f"nothing stands for the image {stage.base}: name a root, --image {stage.base}=DIR."
            )
        run(["cp", "--archive", "--reflink=auto", str(source), str(root)])
        return Image(root, dict(earlier.environment)) if earlier else Image(root)

    def _run_step(self, image: Image, step: Step) -> None:
        known = {**image.arguments, **image.environment}
        match step.name:
            case "ARG":
                image.arguments |= argument(step.text, self._given, known)
            case "ENV":
                image.environment |= assignments(step.text, known)
            case "WORKDIR":
                image.folder = os.path.join(image.folder, expand(step.text, known))
                inside(image.root, image.folder).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = expand(step.text, known)
            case "COPY":
                self._copy(image, shlex.split(expand(step.text, known)))
            case "RUN":
                # Where an engine's network would lead to the registries by itself.
                variables = {**self._pip, **image.arguments}
                enter(image, ["/bin/sh", "-c", step.text], variables, binds(self._pip))
            case "HEALTHCHECK":
                image.health = health_command(step.text)

    def _copy(self, image: Image, words: list[str]) -> None:
        origin = self._context
        if words[0].startswith("--from="):
            origin = self._done[words.pop(0).removeprefix("--from=")].root
        *sources, target = words
        destination = inside(image.root, os.path.join(image.folder, target))
        into = target.endswith("/") or target == "." or len(sources) > 1
        for name in sources:
            source = inside(origin, name)
            if not source.exists():
                raise ImageError(f"COPY {name}: no such file; does .dockerignore let it through?")
            folder = destination if into or source.is_dir() else destination.parent
            folder.mkdir(parents=True, exist_ok=True)
            what = f"{source}/." if source.is_dir() else str(source)
            run(["cp", "--archive", "--no-preserve=ownership", what, str(destination)])

    def _copy_context(self) -> None:
        shutil.rmtree(self._context, ignore_errors=True)
        self._context.mkdir(parents=True)
        for name in allowed((REPOSITORY / ".dockerignore").read_text()):
            source, target = REPOSITORY / name, self._context / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)


def inside(root: Path, path: str) -> Path:
    """A path of a root, seen from outside."""
    return root / path.lstrip("/")


def run(command: Sequence[str], shown: Sequence[str] = ()) -> None:
    """Run a command.

    Args:
        command: an argument list.
        shown: what to call it if it fails.

    Raises:
        ImageError: it failed.
    """
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise ImageError(f"exit code {done.returncode} from: {shlex.join(shown or command)}")


def enter(
    image: Image, command: Sequence[str], variables: Mapping[str, str], bound: Iterable[Path] = ()
) -> None:
    """Run a command in an image; its mounts and all its processes end with it.

    Args:
        image: in which, and as whom.
        command: an argument list.
        variables: more of its environment.
        bound: files and folders of this machine that it finds at the same place.

    Raises:
        ImageError: it failed.
    """
    root = image.root
    script = ["set -e"]
    for name in ("dev", "sys"):
        script.append(f"mount --rbind /{name} {shlex.quote(f'{root}/{name}')}")
    script.append(f"mount -t tmpfs tmpfs {shlex.quote(f'{root}/dev/shm')}")  # noqa: S108 - its own
    script.append(f"mount -t proc proc {shlex.quote(f'{root}/proc')}")
    for path in bound:
        target = inside(root, str(path))
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        script.append(
            f"mount --options bind,ro {shlex.quote(str(path))} {shlex.quote(str(target))}"
        )
    environment = {"HOME": image.home(), **variables, **image.environment}
    words = ["chroot", f"--userspec={image.user}", str(root), "env", "--ignore-environment"]
    words += [f"--chdir={image.folder}", *(f"{k}={v}" for k, v in environment.items()), *command]
    script.append(f"exec {shlex.join(words)}")
    private = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    run([*private, "/bin/sh", "-c", "\n".join(script)], shown=command)


def make_python_root(root: Path) -> Path:
    """A Debian root with Python 3.11, in place of the image; kept for the next time.

    Raises:
        ImageError: debootstrap failed.
    """
    if root.exists():
        return root
    print(f"== debootstrap in place of {PYTHON_IMAGE}", flush=True)
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    if not listed:
        raise ImageError("apt knows no mirror of bookworm: this takes a Debian 12 machine.")
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_PYTHON_PACKAGES}"]
    run([*command, "bookworm", str(partial), listed[0]])
    # As in Debian's slim images: packages that count on these folders fail here, too.
    (partial / "etc/dpkg/dpkg.cfg.d/slim").write_text(
        "path-exclude /usr/share/man/*\npath-exclude /usr/share/doc/*\n"
    )
    shutil.rmtree(partial / "usr/share/man")
    (partial / "usr/share/man").mkdir()
    return partial.rename(root)


def pip_settings() -> dict[str, str]:
    """How pip is set up here, as variables."""
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = {}
    for line in answer.stdout.splitlines():  # those of the environment come last, and win
        name, _, value = line.partition("=")
        words = " ".join(shlex.split(value)).replace("\\n", " ").split()
        settings[f"PIP_{name.rpartition('.')[2].upper().replace('-', '_')}"] = " ".join(words)
    return settings


def binds(settings: Mapping[str, str]) -> list[Path]:
    """What the steps need of this machine to reach the registries: names, apt's and pip's files."""
    found = [Path("/etc/resolv.conf"), Path("/etc/hosts"), Path("/etc/apt")]
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # The pages of an index name the files beside it.
            found.append(path.parent if path.name == "simple" else path)
    return found


def pair(text: str) -> tuple[str, str]:
    """``NAME=VALUE``, split."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def main() -> int:
    """Parse the command line and run the Dockerfile."""
    parser = argparse.ArgumentParser(description="Run a Dockerfile's steps without an engine.")
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a folder with room for the roots")
    parser.add_argument("--build-arg", type=pair, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--image", type=pair, action="append", default=[], metavar="IMAGE=DIR", help="a base's root"
    )
    parser.add_argument("--then", action="append", default=[], help="a command for the last stage")
    options = parser.parse_args()
    given = dict(options.build_arg)
    images = {name: Path(folder).resolve() for name, folder in options.image}
    try:
        if os.geteuid():
            raise ImageError("chroot and mount take root: run it with sudo.")
        stages = parse(options.dockerfile.read_text(), given)
        image = Builder(options.work.resolve(), given, images).build(stages)
        framework = given.get("FRAMEWORK", "torch").partition(",")[0]
        commands = [image.health, ["python", "-c", _HELLO.format(framework)]]
        commands += [["/bin/sh", "-c", line] for line in options.then]
        for command in commands:
            print(f"== as user {image.user}: {shlex.join(command)}", flush=True)
            enter(image, command, {}, [Path("/etc/hosts")])
    except ImageError as error:
        print(f"try_in_chroot: {error}", file=sys.stderr)
        return 1
    print("== all steps passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
