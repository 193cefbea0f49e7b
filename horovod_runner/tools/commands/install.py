"""`horovod-runner install`: build Horovod for the frameworks of this environment and install it.

    find_frameworks -> a published wheel that fits (wheels.py, horovod_build/fit.py), or
    plan_for -> wheel from this user's cache, from a shared folder (wheels.py), or build_wheel
    -> pip install -> prove: two ranks allreduce a tensor with each framework

The cache's key has every version that the wheel was built against. pip's cache knows the source
only: after an upgrade of PyTorch, for example, it would install a wheel that loads and misbehaves.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from horovod_runner.errors import InstallError
from horovod_runner.host.gpus import visible_gpus
from horovod_runner.tools.commands import wheels
from horovod_runner.tools.commands.wheels import Place
from horovod_runner.tools.horovod_build import fit
from horovod_runner.tools.horovod_build.build import build_wheel
from horovod_runner.tools.horovod_build.plan import BuildPlan, find_frameworks, plan_for
from horovod_runner.tools.horovod_build.toolchain import Framework

if TYPE_CHECKING:
    from horovod_runner.tools.hello import Greeting


def add(commands: Any) -> None:
    """Add the command to a parser's commands."""
    install = commands.add_parser(
        "install",
        help="build and install Horovod for the frameworks of this environment",
        description="Install Horovod for the torch and TensorFlow of this Python environment, and "
        "check that two ranks reduce with it. A published wheel that fits is taken from --wheels "
        "or $HOROVOD_RUNNER_WHEELS, after a check of its SHA-256. Otherwise Horovod is built; the "
        "wheel is kept, and used again where all versions are the same.",
    )
    install.add_argument(
        "--frameworks",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="NAMES",
        help="torch, tensorflow, or both separated by a comma (default: all installed)",
    )
    plane = install.add_mutually_exclusive_group()
    plane.add_argument(
        "--gpu",
        action="store_true",
        default=None,
        help="NCCL on GPUs (default: where a framework is a CUDA build and nvcc and NCCL are here)",
    )
    plane.add_argument(
        "--cpu", action="store_false", dest="gpu", default=None, help="no GPU support"
    )
    install.add_argument(
        "--mpi",
        nargs="?",
        choices=("mpich", "system", "none"),
        const="system",
        help="build MPI support beside Gloo: with the mpich package, the system's MPI (the mpicxx "
        "on PATH; --mpi without a value), or none (default: the mpich package, if it is "
        "installed)",
    )
    install.add_argument("--rebuild", action="store_true", help="do not use an existing wheel")
    install.add_argument(
        "--wheels",
        metavar="DIR_OR_URL",
        help="a folder or URL (https://, s3://, ...) of published wheels, or one that hosts share: "
        "a wheel that one of them built for the same versions is installed from there, and a wheel "
        "that is built here is copied there for the others (default: $HOROVOD_RUNNER_WHEELS, for "
        "published wheels alone)",
    )
    install.set_defaults(command=_install)


def _install(options: argparse.Namespace) -> int:
    supported = find_frameworks(options.frameworks)
    place = _place(options.wheels)
    published = None
    if place and not options.rebuild:
        wanted = fit.wish(supported, options.gpu, options.mpi, gpus=bool(visible_gpus()))
        published = find_published_wheel(place, wanted, print)
    if published:
        wheel, sha256 = published
        pip_install(wheel, print, sha256)
    else:
        plan = plan_for(supported, options.gpu, options.mpi)
        print(plan.describe())
        # The variable's place has published wheels alone: nothing is copied there.
        shared = place if options.wheels else None
        wheel = find_or_build_wheel(plan, rebuild=options.rebuild, place=shared, say=print)
        pip_install(wheel, print)
    prove(supported, print)
    return 0


def pip_install(wheel: Path, say: Callable[[str], None], sha256: str | None = None) -> None:
    """Install a wheel and its requirements into this environment.

    pip checks the digest, if there is one, of the bytes that it unpacks.
    """
    if find_spec("pip") is None:
        raise InstallError(
            f"pip is missing in {sys.prefix}, so the wheel {wheel} cannot be installed: "
            "python -m ensurepip, or uv pip install pip"
        )
    # A URL: in a path, a ; would begin what pip calls an environment marker.
    url = wheel.absolute().as_uri() + (f"#sha256={sha256}" if sha256 else "")
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    with _alone(say):
        for command in ([*pip, url], [*pip, "--no-deps", "--force-reinstall", url]):
            # First Horovod's requirements. Then this wheel, over any other wheel of its version.
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise InstallError(f"pip could not install {wheel}: {done.stderr.strip()}")


def _place(shared: str | None) -> Place | None:
    if shared:
        return Place(shared)
    url = os.environ.get(wheels.VARIABLE)
    return Place(url, wheels.VARIABLE) if url else None


def find_published_wheel(
    place: Place, wanted: fit.Wish, say: Callable[[str], None]
) -> tuple[Path, str] | None:
    """Get the published wheel that fits, and its digest; say why and return None if none does."""
    records = wheels.published(place)
    if not records:
        # A folder that hosts share has no index: `install --wheels` needs none.
        if place.setting == wheels.VARIABLE:
            why = "has no wheels.json" if records is None else "lists no wheels"
            say(f"{place.setting}: {place.shown()} {why}, so no wheel was taken from there")
        return None
    chosen, reasons = fit.choose(records, wanted)
    if chosen is None:
        say(f"no wheel of {place.shown()} fits (it has {len(records)}):")
        for reason in reasons:
            say(f"  {reason}")
        return None
    shelf = cache_folder() / "wheels" / "published" / chosen.sha256
    copy = wheels.download(place, chosen, shelf)
    say(f"using {chosen.file} from {place.shown()}, SHA-256 {chosen.sha256[:16]}... checked")
    return copy, chosen.sha256


def find_or_build_wheel(
    plan: BuildPlan,
    *,
    rebuild: bool = False,
    place: Place | None = None,
    say: Callable[[str], None],
    build: Callable[[BuildPlan, Path, Callable[[str], None]], Path] = build_wheel,
) -> Path:
    """Get the wheel of a plan: from this user's cache, from a shared folder, or by a build.

    Args:
        plan: what the wheel is for.
        rebuild: build even if a wheel exists.
        place: a folder with wheels that other hosts built. A wheel that is built here is copied to
            it. None means no shared folder.
        say: called with each line of progress.
        build: builds a wheel, given the plan, the folder for it, and ``say``.
    """
    shelf = cache_folder() / "wheels" / plan.key()
    # Before the lock, which cannot be had in a cache that this user can only read.
    if not rebuild and (before := sorted(shelf.glob("*.whl"))):
        say(f"using the wheel built before: {before[0]}")
        return before[0]
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        lock = (shelf / ".lock").open("w")
    except OSError as error:
        raise wheels.unwritable(shelf, error) from error
    with lock, _locked(lock, say, "another process is building this wheel: waiting for it"):
        cached = sorted(shelf.glob("*.whl"))
        if cached and not rebuild:
            say(f"using the wheel built before: {cached[0]}")
            return cached[0]
        if place and not rebuild:
            with wheels.room_in(shelf) as room:
                copy = wheels.fetch(place, plan.key(), room)
                if copy:
                    say(f"using the wheel that another host built: {place.shown(plan.key())}")
                    return copy.replace(shelf / copy.name)
        wheel = build(plan, shelf, say)
        if place:
            wheels.publish(place, plan.key(), wheel, say)
        return wheel


def cache_folder() -> Path:
    """The folder of built wheels and their logs: ``$XDG_CACHE_HOME/horovod_runner``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "horovod_runner").absolute()


@contextmanager
def _locked(file: IO[str], say: Callable[[str], None], waiting: str) -> Iterator[None]:
    """Hold a lock on a file. The kernel releases it when this process ends, however it ends.

    A file system that knows no locks gives none: two processes may then do the same.
    """
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
    yield


@contextmanager
def _alone(say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process installs into this environment: two pips would mix their files.

    Without a cache that this user can write there is no lock.
    """
    name = hashlib.sha256(os.fsencode(os.path.realpath(sys.prefix))).hexdigest()[:16]
    with ExitStack() as stack:
        with suppress(OSError):
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / f"install-{name}.lock").open("w"))
            waiting = "another process installs into this environment: waiting for it"
            stack.enter_context(_locked(file, say, waiting))
        yield


def prove(
    frameworks: Sequence[Framework],
    say: Callable[[str], None],
    reduce: Callable[[str, int], list[Greeting]] | None = None,
) -> None:
    """Allreduce a tensor over two ranks with each framework."""
    from horovod_runner.tools.hello import expected_total, hello

    for framework in frameworks:
        ranks = (reduce or hello)(framework.name, -2)
        total = expected_total(ranks)
        wrong = [rank for rank in ranks if rank.total != total]
        if wrong:
            raise InstallError(
                f"Horovod was installed but {framework.name} reduced to {wrong[0].total} on rank "
                f"{wrong[0].rank}, not {total}: run `horovod-runner doctor`."
            )
        say(f"two ranks reduced with {framework.name}: ok")
