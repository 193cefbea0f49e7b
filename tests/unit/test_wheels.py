"""Tests of wheels that hosts share: one builds, the others copy, damaged ones are refused."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_runner import InstallError
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.tools.commands import install, wheels
from horovod_runner.tools.commands.wheels import Place
from horovod_runner.tools.horovod_build.plan import BuildPlan
from horovod_runner.tools.horovod_build.toolchain import Framework
from tests.web import served

NAME = "horovod-0.28.1-cp313-cp313-linux_x86_64.whl"
PLAN = BuildPlan((Framework("torch", "2.13.0+cpu"),))
OTHER_PLAN = BuildPlan((Framework("torch", "2.12.0"),))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A shared folder with a wheel of PLAN."""
    built = tmp_path / "built"
    built.mkdir()
    (built / NAME).write_bytes(b"a wheel")
    said: list[str] = []
    wheels.publish(Place(str(tmp_path / "shared")), PLAN.key(), built / NAME, said.append)
    assert said == [f"copied the wheel to {tmp_path / 'shared'} for other hosts"]
    return tmp_path / "shared"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache of a host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refuse(*_: object) -> Path:
    """Build a wheel where nobody can."""
    raise InstallError("built here")


def obtain(
    shared: object, plan: BuildPlan = PLAN, build: Callable[..., Path] = refuse
) -> tuple[Path, list[str]]:
    said: list[str] = []
    found = install.find_or_build_wheel(
        plan, place=Place(str(shared)), say=said.append, build=build
    )
    return found, said


def test_a_wheel_of_another_host_is_copied_into_the_cache(shared: Path, host: Path) -> None:
    wheel, said = obtain(shared)
    assert wheel == host / "horovod_runner" / "wheels" / PLAN.key() / NAME
    assert wheel.read_bytes() == b"a wheel"
    assert said == [f"using the wheel that another host built: {shared}/{PLAN.key()}"]
    (_, again) = obtain(shared)
    assert again == [f"using the wheel built before: {wheel}"]


def test_a_wheel_comes_from_a_web_server(shared: Path, host: Path) -> None:
    with served(shared) as url:
        wheel, said = obtain(f"{url}/")
        assert wheel.read_bytes() == b"a wheel"
        assert "another host built" in said[0]
        with pytest.raises(InstallError, match=r"^built here$"):
            obtain(url, OTHER_PLAN)


def test_rebuild_ignores_a_wheel_of_another_host(shared: Path, host: Path) -> None:
    with pytest.raises(InstallError, match=r"^built here$"):
        install.find_or_build_wheel(
            PLAN, rebuild=True, place=Place(str(shared)), say=print, build=refuse
        )


def test_a_damaged_wheel_is_refused_and_not_cached(shared: Path, host: Path) -> None:
    (stored,) = shared.rglob(NAME)
    stored.write_bytes(b"another")
    with pytest.raises(InstallError, match=r"\.whl .*SHA-256 .*Remove .*/shared/"):
        obtain(shared)
    assert not list(host.rglob("*.whl"))
    stored.unlink()
    with pytest.raises(InstallError, match=r"\.whl .*\(FileNotFoundError"):
        obtain(shared)


@pytest.mark.parametrize("pointer", ["", "abc  x.whl", f"{'0' * 64}  ../../x.whl"])
def test_a_pointer_that_names_no_wheel_is_an_error(shared: Path, host: Path, pointer: str) -> None:
    (shared / PLAN.key() / "latest.sha256").write_text(pointer)
    with pytest.raises(InstallError, match=rf"/latest\.sha256 .*: {pointer!r}\. "):
        obtain(shared)


def test_a_shared_folder_that_cannot_be_read_is_an_error(host: Path) -> None:
    with pytest.raises(InstallError, match="--wheels nonsense://x "):
        obtain("nonsense://x")


def test_a_built_wheel_is_copied_to_the_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(plan: BuildPlan, shelf: Path, _: object) -> Path:
        (shelf / NAME).write_bytes(b"built now")
        return shelf / NAME

    for host in ("first", "second"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        wheel, said = obtain(tmp_path / "shared", build=build)
        assert wheel.read_bytes() == b"built now"
    assert "another host built" in said[0]


def test_a_shared_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    wheel = tmp_path / NAME
    wheel.touch()
    (tmp_path / "file").touch()
    said: list[str] = []
    wheels.publish(Place(str(tmp_path / "file")), PLAN.key(), wheel, said.append)
    assert said[0].startswith(
        f"the wheel was not copied to {tmp_path / 'file'}: NotADirectoryError"
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_pointer_is_written_after_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalFolder.move_in

    def move_in(folder: LocalFolder, part: Path, name: str) -> None:
        if name == NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(folder, part, name)

    wheel = tmp_path / NAME
    wheel.touch()
    monkeypatch.setattr(LocalFolder, "move_in", move_in)
    said: list[str] = []
    wheels.publish(Place(str(tmp_path / "shared")), PLAN.key(), wheel, said.append)
    assert said[0].startswith("the wheel was not copied")
    assert [path for path in (tmp_path / "shared").rglob("*") if path.is_file()] == []


def test_two_installs_at_the_same_time_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builds, go_on, waits = [], threading.Event(), threading.Event()

    def build(plan: BuildPlan, shelf: Path, _: object) -> Path:
        builds.append(plan)
        assert go_on.wait(60)
        (shelf / NAME).touch()
        return shelf / NAME

    def say(line: str) -> None:
        if "waiting for it" in line:
            waits.set()

    options = {"say": say, "build": build}
    both = [
        threading.Thread(target=install.find_or_build_wheel, args=(PLAN,), kwargs=options)
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    assert waits.wait(60)
    go_on.set()
    for thread in both:
        thread.join()
    assert builds == [PLAN]
