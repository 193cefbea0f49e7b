"""A disk that is full at one write after the other: it is told, and costs only what it cannot hold.

A small tmpfs takes the place of one folder, with more room for each run: another write fails.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import programs

_MOUNT = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
_START = 24  # kB that two ranks write before main begins
_NAMESPACE = ["unshare", "--mount", "sh", "-c", _MOUNT]


def run(
    tmp_path: Path, case: str, sizes: list[int], variable: str = "", disk: Path | None = None
) -> list[dict[str, Any]]:
    """Run a case with so many kB left on a disk; returns how the runs ended.

    Args:
        tmp_path: a folder of the test.
        case: see tests/real/full_disk.py.
        sizes: how many kB are left at the beginning of each run.
        variable: the environment variable that names the disk; empty for none.
        disk: where the disk is mounted; None for a folder of the test.
    """
    disk, other = disk or tmp_path / "disk", tmp_path / "other"
    for folder in (disk, other):
        folder.mkdir(exist_ok=True)
    probe = [*_NAMESPACE, str(disk), "true"]
    if programs.run(*probe).returncode:
        pytest.skip("this user may not mount")
    named = {"TMPDIR": str(other), "XDG_STATE_HOME": str(other / "state")}
    named |= {variable: str(disk)} if variable else {}
    program = [sys.executable, "-m", "tests.real.full_disk", case, str(disk), str(other)]
    done = programs.run(*_NAMESPACE, disk, *program, *sizes, variables=named)
    ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"free"')]
    assert [each["free"] for each in ended] == sizes, done.stderr
    for each in ended:
        each["stderr"] = done.stderr
        assert each["own"], each  # and no bare OSError
        assert each["error"] or each["value"].startswith("value")
        # Checkpoints that count are whole.
        assert each.get("saved", []) == each.get("steps", [])
    return ended


def told(ended: dict[str, Any], *texts: str) -> bool:
    """Whether the error or a notice has all texts."""
    said = [ended["error"], *ended.get("notices", [])]
    return any(all(text in each for text in texts) for each in said)


def test_arguments_that_find_no_room_are_an_error_with_the_folder(tmp_path: Path) -> None:
    *little, much = run(tmp_path, "arguments", [0, 4, 64, 256], "TMPDIR")
    for each in little:
        assert told(each, "main and its arguments", f"in {tmp_path}/disk, where ", "TMPDIR"), each
    assert much["value"] == "value"


def test_a_dataset_that_finds_no_room_is_an_error_with_the_folder(tmp_path: Path) -> None:
    *little, much = run(tmp_path, "dataset", [0, 4, 8, 16, 24, 32, 40, 1024], "TMPDIR")
    for each in little:
        assert each["value"] or told(each, f"{tmp_path}/disk", " free", "TMPDIR"), each
    assert little[0]["error"]
    assert much["value"] == "value"


def test_a_value_comes_back_from_a_full_disk(tmp_path: Path) -> None:
    for each in run(tmp_path, "value", [_START, 64, 1024], "TMPDIR"):
        assert each["value"] == "value" * 50_000


@pytest.mark.parametrize(
    ("case", "variable", "setting"),
    [
        ("checkpoints", "", "(checkpoint_dir)"),
        ("temporary checkpoints", "TMPDIR", "(checkpoint_dir)"),
        ("folder", "TMPDIR", "TMPDIR"),
    ],
)
def test_a_checkpoint_that_finds_no_room_costs_nothing_else(
    tmp_path: Path, case: str, variable: str, setting: str
) -> None:
    ended = run(tmp_path, case, [_START, 48, 64, 88, 104, 132, 152, 1024], variable)
    for each in ended:
        assert each["value"] == "value"
        lacks = len(each["steps"]) < 2
        assert not lacks or told(each, "could not be written: [Errno 28]", "are free", setting)
    assert told(ended[0], f"in {tmp_path}/disk", " kB are free")
    assert ended[0]["steps"] == []
    assert ended[-1]["steps"][-1] == 3
    assert not told(ended[-1], "could not be written")


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="takes Keras with TensorFlow")
def test_a_keras_model_that_finds_no_room_is_told_with_the_folder(tmp_path: Path) -> None:
    for each in run(tmp_path, "keras", [_START, 32, 60, 400], "TMPDIR"):
        assert each["value"] == "value"
        lacks = each["steps"] != [0, 1]
        told_so = told(each, "could not be written", f" in {tmp_path}/disk", "free", "TMPDIR")
        assert lacks == told_so, each


def test_a_run_without_room_for_its_record_says_so(tmp_path: Path) -> None:
    none, little, *_, much = run(tmp_path, "record", [0, 4, 8, 64], "XDG_STATE_HOME")
    for each in (none, little, much):
        assert each["value"] == "value"
    record = ("the record of this run could not", f"{tmp_path}/disk/", "0 bytes", "XDG_STATE_HOME")
    assert told(none, *record)
    assert told(none, "this run is not listed", f"{tmp_path}/disk/", "0 bytes", "XDG_STATE_HOME")
    assert told(little, *record)
    assert not told(much, "XDG_STATE_HOME")


def test_a_commit_that_finds_no_room_is_an_error_with_the_folder(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    *little, much = run(tmp_path, "commits", [0, 2044, 2048, 2052, 2056, 3072], disk=memory)
    for each in little:
        assert each["value"] or told(each, "no room in /dev/shm/", " are free", "--shm-size"), each
    assert told(little[0], "a state of 40.0 kB needs")
    assert told(little[2], "[Errno 28]")
    assert much["value"] == "value"


def test_a_sink_that_finds_no_room_costs_the_sink_alone(tmp_path: Path) -> None:
    none, little, much = run(tmp_path, "tensorboard", [0, 4, 256])
    for each in (none, little, much):
        assert each["value"] == "value"
    shown = none["stderr"]  # of all three runs
    assert "TensorBoardSink failed" in shown
    assert f" in {tmp_path}/disk/board" in shown
    assert ", where 0 bytes are free. The disk is full" in shown
    assert shown.count("the sink TensorBoardSink failed") < 3


@pytest.mark.horovod
def test_a_timeline_that_finds_no_room_costs_the_timeline_alone(tmp_path: Path) -> None:
    none, much = run(tmp_path, "timeline", [0, 256])
    assert none["value"] == much["value"] == "value"
    assert told(
        none, "timeline could not be written", f"in {tmp_path}/disk, where 0 bytes", "(timeline)"
    )
    assert told(much, f"Horovod's timeline: {tmp_path}/disk/t.json")


@pytest.mark.parametrize(
    ("case", "variable", "sizes", "setting"),
    [
        ("trace", "XDG_STATE_HOME", [0, 4, 8], 'torch_profiler="DIR"'),
        ("trace in a rank", "TMPDIR", [_START, 28], "TMPDIR"),
    ],
)
def test_a_trace_that_finds_no_room_costs_the_trace_alone(
    tmp_path: Path, case: str, variable: str, sizes: list[int], setting: str
) -> None:
    for each in run(tmp_path, case, sizes, variable):
        assert each["value"] == "value"
        assert told(each, "has sent no trace", f"in {tmp_path}/disk/", setting), each


def test_without_any_folder_for_temporary_files_the_error_says_so() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from horovod_runner import HorovodRunner\n"
        "HorovodRunner(np=-1).run(int)"
    )
    done = programs.run_python(script)
    (error,) = [line for line in done.stderr.splitlines() if "set TMPDIR" in line]
    assert "there is no folder for temporary files: No usable temporary directory" in error
    assert "are free in /tmp" in error
