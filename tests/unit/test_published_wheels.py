"""Tests of published wheels: their names and records, the index, and which one an install takes."""

from __future__ import annotations

import base64
import configparser
import csv
import errno
import hashlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from horovod_runner import InstallError
from horovod_runner.common.files import file_sha256
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.tools.commands import cli, install
from horovod_runner.tools.commands.wheels import Place
from horovod_runner.tools.horovod_build import fit, libraries, release, source
from horovod_runner.tools.horovod_build.plan import BuildPlan, python_tag
from horovod_runner.tools.horovod_build.provenance import BuiltFor, GpuLibraries, Provenance
from horovod_runner.tools.horovod_build.toolchain import Framework, Mpi
from tests.programs import run
from tests.web import served

ROOT = Path(__file__).parents[2]
TORCH = Framework("torch", "2.13.0+cpu")
TENSORFLOW = Framework("tensorflow", "2.21.0")
PLAN = BuildPlan((TORCH,), mpi=Mpi(True, "5.0.2", Path("lib")))
DIGEST = source.digest()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel as pip builds it, with a real shared library and a script."""
    (library,) = Path(msgspec.__file__).parent.glob("_core.*.so")
    folder = tmp_path_factory.mktemp("built")
    wheel = folder / f"horovod-0.28.1-{python_tag()}-{python_tag()}-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "__version__ = '0.28.1'\n")
        archive.write(library, "horovod/torch/mpi_lib_v2.so")
        archive.writestr("horovod-0.28.1.data/scripts/horovodrun", "#!python\n")
        archive.writestr(
            "horovod-0.28.1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\nRequires-Dist: mpich>=4\n\nx\n",
        )
        tag = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {python_tag()}-x-linux_x86_64\n"
        archive.writestr("horovod-0.28.1.dist-info/WHEEL", tag)
        archive.writestr("horovod-0.28.1.dist-info/RECORD", "outdated\n")
    return wheel


@pytest.fixture(scope="module")
def published(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that wheel, published."""
    folder = tmp_path_factory.mktemp("published")
    release.release(built, PLAN, folder, runner="0.1.0")
    release.write_index(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder; and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(published, tmp_path / "wheels")


def the_record(folder: Path) -> Provenance:
    (path,) = folder.glob("*.whl.json")
    return msgspec.json.decode(path.read_bytes(), type=Provenance)


def take(folder: object, wanted: fit.Wish, setting: str = "--wheels") -> tuple[Any, list[str]]:
    said: list[str] = []
    found = install.find_published_wheel(Place(str(folder), setting), wanted, said.append)
    assert found is None or file_sha256(found[0]) == found[1]
    return found and found[0], said


def here(*frameworks: Framework) -> fit.Wish:
    return fit.wish(frameworks or (TORCH,), None, None, gpus=False)


def test_name_and_record_say_what_a_wheel_is_for_and_was_built_with(folder: Path) -> None:
    record = the_record(folder)
    assert record.file.startswith(f"horovod-0.28.1+cpu.torch2.13.0.mpich.p{DIGEST}-{python_tag()}-")
    assert record.file.endswith(f"-manylinux_{record.glibc.replace('.', '_')}_{record.machine}.whl")
    assert (folder / record.file).stat().st_size == record.size
    assert record.frameworks == {"torch": BuiltFor("2.13.0+cpu", None)}
    assert record.flags["HOROVOD_WITH_PYTORCH"] == record.flags["HOROVOD_WITH_MPI"] == "1"
    assert record.symbols["GLIBC"]
    assert "libc.so.6" in record.libraries
    assert "GCC" in record.compiler
    assert record.container is None
    patches = {name for name in record.patches if not name.startswith("overlay/")}
    assert patches == {path.name for path in source.PATCHES.iterdir()}
    assert record.patches_digest == DIGEST


def pip(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run pip with the index page of a folder."""
    page = ("--no-index", "--find-links", folder / "index.html")
    return run(sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", *page, timeout=100)


def test_pip_installs_the_wheel_from_the_index_page(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    version = the_record(folder).file.split("-")[1]
    done = pip(folder, "install", "--target", target, f"horovod=={version}")
    assert done.returncode == 0, done.stderr
    (found,) = metadata.distributions(path=[str(target)])
    assert found.version == version
    assert found.requires == ["mpich>=4", "torch==2.13.0", "numpy"]
    assert (target / "bin" / "horovodrun").exists()


def test_pip_refuses_a_wheel_that_is_not_the_one_of_the_index(folder: Path, tmp_path: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = pip(folder, "download", "--dest", tmp_path, "horovod")
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_the_list_of_files_in_a_wheel_has_their_digests(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert set(rows) == set(archive.namelist())
        for name in set(rows) - {record}:
            digest = hashlib.sha256(archive.read(name)).digest()
            encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            assert rows[name] == [f"sha256={encoded}", str(archive.getinfo(name).file_size)]


def test_the_same_build_makes_the_same_wheel(folder: Path, built: Path, tmp_path: Path) -> None:
    again = release.release(built, PLAN, tmp_path / "again", runner="0.1.0")
    assert again == the_record(folder)


def test_a_wheel_for_the_systems_mpi_is_not_published(built: Path, tmp_path: Path) -> None:
    plan = BuildPlan((TORCH,), mpi=Mpi(False, "4.1.4"))
    with pytest.raises(InstallError, match=r"mpich .*--mpi none"):
        release.release(built, plan, tmp_path, runner="0.1.0")


def test_an_index_has_sums_for_sha256sum_and_may_lie_elsewhere(
    folder: Path, tmp_path: Path
) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    release.write_index(folder, "https://example.org/releases/v1")
    assert '<base href="https://example.org/releases/v1/">' in (folder / "index.html").read_text()
    assert release.write_index(tmp_path / "of none") == []
    assert (tmp_path / "of none" / "index.html").exists()


def test_a_nightly_build_has_a_name_that_pip_understands() -> None:
    nightly = Framework("tensorflow", "2.22.0-dev20260101")
    old = Framework("torch", "2.4.0+cu121", cxx11_abi=False)
    label = release.label(BuildPlan((nightly, old)))
    assert label == f"cpu.tensorflow2.22.0.dev20260101.torch2.4.0.abi0.p{DIGEST}"


def test_no_index_is_written_for_wheels_that_are_not_those_of_their_records(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    wheel.write_bytes(b"another")
    with pytest.raises(InstallError, match=r"\.whl .*record: .*SHA-256"):
        release.write_index(folder)
    (folder / f"{wheel.name}.json").unlink()
    with pytest.raises(InstallError, match=r"/wheels .*record: horovod.*\.whl$"):
        release.write_index(folder)
    (folder / "x.whl.json").write_text("{")
    with pytest.raises(InstallError, match=r"/x\.whl\.json .*record"):
        release.write_index(folder)


@pytest.mark.parametrize(
    ("symbols", "glibc"),
    [
        ("GLIBC_2.2.5 GLIBC_2.17 GLIBC_2.9", "2.17"),
        ("GLIBC_2.34 GLIBCXX_3.4.19", "2.34"),
        ("GLIBC_2.34 GLIBCXX_3.4.30 GLIBCXX_3.4.9", "2.35"),
        ("GLIBC_2.14 GLIBCXX_3.4.23 CXXABI_1.3.12", "2.31"),
        ("GLIBC_2.14 GLIBC_ABI_DT_RELR", "2.36"),
    ],
)
def test_the_oldest_c_library_follows_from_the_symbols(symbols: str, glibc: str) -> None:
    assert libraries.parse(symbols).glibc == glibc


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GLIBCXX_3.4.99", r"GLIBCXX_3\.4\.99 "),
        (" (NEEDED)  Shared library: [libmpi.so.40]", r"libmpi\.so\.40"),
        (" (NEEDED)  Shared library: [libnuma.so.1]", r"libnuma\.so\.1"),
    ],
)
def test_a_wheel_that_would_not_load_elsewhere_is_not_published(text: str, message: str) -> None:
    with pytest.raises(InstallError, match=message):
        libraries.parse(text)


WANTED = fit.Wish((TORCH,), None, None, "cp313", "x86_64", frozenset({"avx", "fma"}), "2.36", False)
CUDA = Framework("torch", "2.13.0+cu130", "13.0")
OLD_ABI = {"torch": BuiltFor("2.13.0", cxx11_abi=False)}


def wheel(**changes: Any) -> Provenance:
    values: dict[str, Any] = dict.fromkeys(Provenance.__struct_fields__, "")
    values |= {
        "file": "horovod-0.28.1+cpu-cp313-cp313-manylinux_2_28_x86_64.whl",
        "size": 1,
        "sha256": "0" * 64,
        "horovod": source.VERSION,
        "horovod_runner": "0.1.0",
        "patches": {},
        "patches_digest": DIGEST,
        "python": "cp313",
        "machine": "x86_64",
        "glibc": "2.28",
        "symbols": {},
        "libraries": (),
        "frameworks": {"torch": BuiltFor("2.13.0")},
        "gpu": None,
        "mpich": None,
        "processor_flags": "-mavx -mfma",
        "flags": {},
        "container": None,
    }
    return Provenance(**(values | changes))


FOR_GPUS = {
    "frameworks": {"torch": BuiltFor("2.13.0+cu130", "13.0")},
    "gpu": GpuLibraries("13.0", "2.29.7", "80,90"),
}


@pytest.mark.parametrize(
    ("offered", "wanted", "reason"),
    [
        ({}, {}, None),
        ({"frameworks": {"torch": BuiltFor("2.13.0+cu130", "13.0")}}, {}, None),
        ({"mpich": "5.0.2"}, {}, None),
        ({"mpich": "5.0.2"}, {"mpi": "mpich"}, None),
        ({"machine": "aarch64"}, {}, "for aarch64, and this machine is x86_64"),
        ({"python": "cp312"}, {}, "for Python cp312, and this Python is cp313"),
        ({}, {"python": "cp313t"}, "this Python is cp313t"),
        ({"frameworks": {"torch": BuiltFor("2.12.1")}}, {}, "for torch 2.12.1, and 2.13.0 is"),
        ({}, {"frameworks": (TORCH, TENSORFLOW)}, "torch and tensorflow is wanted .--frameworks"),
        ({"patches_digest": "0"}, {}, "its patches were others"),
        ({"horovod": "0.29.0"}, {}, "its patches were others"),
        ({"glibc": "2.39"}, {}, "needs glibc 2.39, and here is 2.36"),
        ({"glibc": "2.4"}, {"glibc": "2.28"}, None),
        ({}, {"glibc": ""}, "here is another C library"),
        ({"processor_flags": "-mavx512f -mfma"}, {}, "this processor lacks avx512f"),
        ({"mpich": "5.0.2"}, {"mpi": "none"}, "needs the mpich package"),
        ({}, {"mpi": "mpich"}, "has no MPI"),
        ({}, {"mpi": "system"}, "not for the system's MPI"),
        ({}, {"gpu": True}, "for CPUs, and one for GPUs is wanted"),
        ({}, {"gpus": True}, None),
        ({}, {"gpus": True, "frameworks": (CUDA,)}, "for CPUs, and one for GPUs is wanted: --cpu"),
        ({}, {"gpus": True, "frameworks": (CUDA,), "gpu": False}, None),
        ({"processor_flags": "-march=x86-64"}, {}, None),
        ({"processor_flags": "-march=x86-64-v3"}, {}, "lacks abm, avx2, bmi1"),
        ({"processor_flags": "-march=native"}, {}, "lacks native"),
        ({"frameworks": OLD_ABI}, {"frameworks": (replace(TORCH, cxx11_abi=False),)}, None),
        ({"frameworks": OLD_ABI}, {}, None),
        (
            {"frameworks": OLD_ABI},
            {"frameworks": (replace(TORCH, cxx11_abi=True),)},
            "for a torch with the older C.. interface",
        ),
        (FOR_GPUS, {"gpus": True, "frameworks": (CUDA,)}, None),
        (FOR_GPUS, {"gpu": True, "frameworks": (CUDA,)}, None),
        (FOR_GPUS, {"frameworks": (CUDA,)}, "for GPUs, and one for CPUs is wanted: --gpu"),
        (FOR_GPUS, {"gpu": True}, "for CUDA 13.0, and torch is for CPUs"),
        (
            FOR_GPUS,
            {"gpu": True, "frameworks": (Framework("torch", "2.13.0+cu126", "12.6"),)},
            "for CUDA 13.0, and torch is for 12.6",
        ),
        *(
            (FOR_GPUS, {"gpu": True, "frameworks": (CUDA,), "capabilities": (gpu,)}, reason)
            for gpu, reason in [
                (80, None),
                (86, None),  # of the generation of 8.0
                (120, None),  # compiles the PTX of 9.0
                (75, "for GPUs of compute capability 8.0, 9.0, and 7.5 is wanted"),
            ]
        ),
    ],
)
def test_a_wheel_fits_or_the_reason_is_named(
    offered: dict[str, Any], wanted: dict[str, Any], reason: str | None
) -> None:
    chosen, reasons = fit.choose([wheel(**offered)], replace(WANTED, **wanted))
    assert (chosen is None) == (reason is not None)
    if reason:
        (line,) = reasons
        assert line.startswith("horovod-0.28.1+cpu-cp313")
        assert re.search(reason, line)


def test_of_several_wheels_that_fit_one_with_mpi_is_taken() -> None:
    wheels = [wheel(), wheel(mpich="5.0.2", glibc="2.34"), wheel(mpich="5.0.2", glibc="2.9")]
    assert fit.choose(wheels, WANTED)[0] is wheels[2]
    assert fit.choose(wheels, replace(WANTED, mpi="none"))[0] is wheels[0]


def test_the_wheels_that_nearly_fit_are_named_first() -> None:
    others = [wheel(python=f"cp{number}") for number in range(30, 40)]
    near = wheel(glibc="2.39", file="near.whl")
    _, reasons = fit.choose([*others, near], WANTED)
    assert reasons[0] == "near.whl: it needs glibc 2.39, and here is 2.36"
    assert reasons[3:] == ["and 8 more, which fit less"]


def test_install_takes_the_published_wheel_and_keeps_it(folder: Path) -> None:
    record = the_record(folder)
    copy, said = take(folder, here())
    assert copy.name == record.file
    assert said == [f"using {record.file} from {folder}, SHA-256 {record.sha256[:16]}... checked"]
    (folder / record.file).unlink()
    assert take(folder, here())[0] == copy


def test_install_takes_the_wheel_from_a_web_server_without_more_packages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with served(folder) as url:
        copy, said = take(url, here())
        assert copy.name == the_record(folder).file
        assert f"from {url}, SHA-256" in said[0]
        assert take(f"{url}/elsewhere", here()) == (None, [])


def test_a_wheel_that_was_exchanged_is_refused_and_not_kept(folder: Path, tmp_path: Path) -> None:
    (folder / the_record(folder).file).write_bytes(b"another")
    with pytest.raises(InstallError, match=r"\.whl .*SHA-256 .*wheels\.json \(7 bytes, "):
        take(folder, here())
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_copy_that_was_damaged_is_fetched_again(folder: Path) -> None:
    copy, _ = take(folder, here())
    copy.write_bytes(b"half")
    take(folder, here())
    assert file_sha256(copy) == the_record(folder).sha256


def test_install_says_why_no_published_wheel_fits(folder: Path) -> None:
    other = Framework("torch", "2.12.1")
    taken, said = take(folder, here(other))
    assert taken is None
    assert said[0] == f"no wheel of {folder} fits (it has 1):"
    assert said[1].endswith("it was built for torch 2.13.0, and 2.12.1 is installed")


def test_a_place_without_an_index_is_named_if_the_variable_names_it(tmp_path: Path) -> None:
    assert take(tmp_path, here()) == (None, [])
    _, said = take(tmp_path, here(), "HOROVOD_RUNNER_WHEELS")
    assert said == [
        f"HOROVOD_RUNNER_WHEELS: {tmp_path} has no wheels.json, so no wheel was taken from there"
    ]


def test_a_place_that_cannot_be_read_is_an_error_that_names_the_setting() -> None:
    message = r"^HOROVOD_RUNNER_WHEELS nonsense://x .*, or .*HOROVOD_RUNNER_WHEELS"
    with pytest.raises(InstallError, match=message):
        take("nonsense://x", here(), "HOROVOD_RUNNER_WHEELS")


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        (b"horovod-0.28.1", b"../horovod-0.28.1", " horovod_runner "),
        (b'"size"', b'"x"', " horovod_runner "),
        (b'"glibc": "', b'"glibc": "x', " horovod_runner "),
        (
            b'"gpu": null',
            b'"gpu": {"cuda": "13.0", "nccl": "2", "architectures": "8.0"}',
            " horovod_runner ",
        ),
        (None, b"<html>Sign in</html>", " page,"),
        (None, b'[{"file": "\xff"}]', " page,"),
        (None, b"", " page,"),
    ],
)
def test_an_index_that_is_none_is_an_error(
    folder: Path, old: bytes | None, new: bytes, cause: str
) -> None:
    index = folder / "wheels.json"
    index.write_bytes(new if old is None else index.read_bytes().replace(old, new))
    with pytest.raises(InstallError, match=rf"/wheels\.json .*{cause}"):
        take(folder, here())


def test_installs_at_the_same_time_do_not_share_an_unfinished_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (folder / the_record(folder).file).read_bytes()
    halfway, go_on = threading.Event(), threading.Event()

    def copy_out(store: LocalFolder, name: str, path: Path) -> None:
        with path.open("wb") as file:
            file.write(data[:100])
            file.flush()
            if not halfway.is_set():
                halfway.set()
                assert go_on.wait(60)
            file.write(data[100:])

    monkeypatch.setattr(LocalFolder, "copy_out", copy_out)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(take, folder, here())
        assert halfway.wait(60)
        try:
            quick, _ = take(folder, here())
        finally:
            go_on.set()
        copy, _ = slow.result(60)
    assert copy == quick
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_a_cache_that_cannot_be_written_is_named_with_its_setting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InstallError, match=r"/file/.*XDG_CACHE_HOME"):
        take(folder, here())
    with pytest.raises(InstallError, match=r"/file/.*XDG_CACHE_HOME"):
        install.find_or_build_wheel(PLAN, say=print)


def test_a_full_disk_is_not_a_fault_of_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_out(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFolder, "copy_out", copy_out)
    with pytest.raises(InstallError, match=r"/cache/.*No space left .*XDG_CACHE_HOME"):
        take(folder, here())


def test_a_place_may_have_spaces_and_letters_of_any_language(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "räder; zwei")
    assert take(other, here())[0].name == the_record(folder).file
    (tmp_path / "cache" / "horovod_runner" / "wheels").rename(tmp_path / "before")
    with served(tmp_path) as url:
        assert take(f"{url}/räder; zwei", here())[0].name == the_record(folder).file


SHARED, PUBLISHED = Place("/shared"), Place("/published", "HOROVOD_RUNNER_WHEELS")


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ("", "", [None, (None, None), (False, None)]),
        ("", "/published", [None, (PUBLISHED, None, None), (None, None), (False, None)]),
        (
            "--wheels /shared --cpu",
            "/published",
            [None, (SHARED, False, None), (False, None), (False, SHARED)],
        ),
        (
            "--wheels /shared --rebuild --gpu --mpi --frameworks 'torch, tensorflow'",
            "",
            [["torch", "tensorflow"], (True, "system"), (True, SHARED)],
        ),
    ],
)
def test_install_follows_the_users_choices(
    monkeypatch: pytest.MonkeyPatch, arguments: str, variable: str, expected: list[object]
) -> None:
    """The option for wheels is stronger than the variable. `--rebuild` takes no published wheel."""
    calls: list[object] = []

    def find_frameworks(names: object) -> tuple[Framework]:
        calls.append(names)
        return (TORCH,)

    def find_published_wheel(place: Place, wanted: fit.Wish, _: object) -> None:
        calls.append((place, wanted.gpu, wanted.mpi))

    def plan_for(_: object, *choices: object) -> BuildPlan:
        calls.append(choices)
        return PLAN

    def find_or_build_wheel(_: object, *, rebuild: bool, place: object, say: object) -> Path:
        calls.append((rebuild, place))
        return Path("x.whl")

    monkeypatch.setenv("HOROVOD_RUNNER_WHEELS", variable)
    for function in (find_frameworks, find_published_wheel, plan_for, find_or_build_wheel):
        monkeypatch.setattr(install, function.__name__, function)
    for name in ("pip_install", "prove"):
        monkeypatch.setattr(install, name, lambda *_: None)
    assert cli.main(["install", *shlex.split(arguments)]) == 0
    assert calls == expected


def test_the_table_the_page_the_workflow_and_the_package_name_the_same_wheels() -> None:
    make = [sys.executable, str(ROOT / "wheels" / "make.py"), "--list"]
    listed = subprocess.check_output(make, text=True, timeout=60).split()
    table = tomllib.loads((ROOT / "wheels" / "table.toml").read_text())
    assert listed == [f"{python}-{row}" for python in table["pythons"] for row in table["rows"]]
    (page,) = (path.read_text() for path in (ROOT / "docs").rglob("wheels.md"))
    assert re.findall(r"^\| `([a-z-]+)`.*yes \| yes \| yes", page, re.MULTILINE) == [*table["rows"]]
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert "wheels/make.py --list" in workflow
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options"]["python_requires"] == f">={table['pythons'][0]}"
    assert table["left_out"]["3.10"]
