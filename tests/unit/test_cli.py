"""The command line and the doctor's report."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.results import registry
from horovod_runner.tools.commands import cli, doctor, trial
from horovod_runner.tools.commands.doctor import DoctorFinding


def test_an_error_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["install", "--frameworks", "mxnet"]) == 1
    said = "horovod-runner: unknown framework mxnet; choose from torch and tensorflow.\n"
    assert capsys.readouterr().err == said


def test_who_has_no_home_folder_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    for command in ("ps", "report"):
        assert cli.main([command]) == 1
        assert capsys.readouterr().err.endswith("set XDG_STATE_HOME to another folder\n")


def test_a_reader_that_has_seen_enough_causes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "horovod_runner.tools.commands.cli", "ps"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_that_stdout_cannot_encode_is_escaped(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    entry = registry.Entry("1a2b", "entra\u00eenement", -2, "local", "box", 7, "", 0.0)
    # A test of another process may have runs, too.
    monkeypatch.setattr(registry, "find", lambda: [registry.ListedRun("1a2b", entry, True, [7])])
    with redirect_stdout(io.TextIOWrapper(written, encoding, write_through=True)) as stream:
        assert cli.main(["ps"]) == 0
    assert not stream.closed
    shown = {"ascii": r"entra\xeenement", "utf-8": "entra\u00eenement"}[encoding]
    assert f" {shown} " in written.getvalue().decode(encoding)


def test_the_report_ends_with_what_to_do_or_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        DoctorFinding("Python", "ok", "3.11"),
        DoctorFinding("MPI", "absent", "not found"),
        DoctorFinding("Horovod", "wrong", "not installed", "run: horovod-runner install"),
    ]
    assert doctor.report(findings, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["ok", "Python"],
        ["absent", "MPI"],
        ["wrong", "Horovod"],
    ]
    assert lines[-1] == "Horovod: run: horovod-runner install"
    assert doctor.report(findings[:2], as_json=False) == 0
    assert capsys.readouterr().out.endswith("Everything works.\n")
    assert doctor.report([DoctorFinding("GPUs", "ok", "1\n2")], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "findings": [{"name": "GPUs", "status": "ok", "detail": "1\n2", "advice": ""}],
    }


def test_stop_ends_all_runs_or_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [
        registry.ListedRun("1a2b", None, False, [7]),
        registry.ListedRun("1a3c", None, False, [8]),
    ]
    stopped: list[str] = []

    def stop(found: registry.ListedRun, seconds: float) -> str:
        stopped.append(found.run_id)
        return "" if found.run_id == "1a2b" else "processes that do not end: 8"

    # A test of another process may have runs, too, and this one's have no processes.
    monkeypatch.setattr(registry, "find", lambda: there)
    monkeypatch.setattr(registry, "stop", stop)
    assert cli.main(["stop", "1a2"]) == 0
    assert stopped == ["1a2b"]
    assert cli.main(["stop", "1a"]) == 1
    assert cli.main(["stop", "ff"]) == 1
    del there[1]
    assert cli.main(["stop", ""]) == 1
    assert stopped == ["1a2b"]
    said = capsys.readouterr()
    assert "1a may be 1a2b, 1a3c" in said.err
    assert "no run ff here; there are: 1a2b, 1a3c" in said.err
    assert "no run with an empty id here; there are: 1a2b" in said.err
    there.append(registry.ListedRun("1a3c", None, False, [8]))
    assert cli.main(["stop", "--all"]) == 1
    assert stopped == ["1a2b", "1a2b", "1a3c"]
    assert capsys.readouterr().err == "1a3c: processes that do not end: 8\n"
    there.clear()
    assert cli.main(["stop", "--all"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stop", "--al"], "one of the arguments RUN --all is required"),  # --al is not --all
        (["report", "--ouput", "x"], "unknown arguments: --ouput. Did you mean --output?"),
        (["install", "--whels", "x"], "unknown arguments: --whels x. Did you mean --wheels?"),
        (["doctor", "--zzz"], "unknown arguments: --zzz."),
        ([], "the following arguments are required: COMMAND"),
        (["install", "--gpu", "--cpu"], "--cpu: not allowed with argument --gpu"),
        (["docter"], "Did you mean doctor?"),
        (["run", "train.py", "--gpu-pinning", "maks"], "Did you mean mask?"),
    ],
)
def test_wrong_usage_has_status_2_and_an_unknown_argument_names_the_commands_own_flag(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--hang-timout", "--hang-timeout"),
        ("--no-progess", "--no-progress"),
        ("--gup", "--gpu"),
        ("--keep=3", "--num-to-keep"),
        ("-np", "--np"),
    ],
)
def test_an_unknown_argument_of_run_may_be_the_trainings(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "train.py", flag]) == 2
    assert capsys.readouterr().err == (
        f"horovod-runner run: unknown arguments: {flag}. Did you mean {meant}? Arguments of the "
        f"training go after a -- at the end of the command: -- {flag}\n"
    )


def test_a_tried_folder_has_rates_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # each action takes half a second
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 2)
    found = {each.name: each.detail for each in trial.try_folder(str(tmp_path))}
    monkeypatch.undo()
    assert found["folder"].startswith(f"{tmp_path} (")
    assert found["write"] == found["read"] == "34 MB/s (16 MiB in 0.50 s)"
    assert found["list"] == "500 ms for 1 files"
    assert found["small files"] == "62 ms for each"  # 8 files
    assert found["delete"] == "250 ms for each"  # 2 files


@pytest.mark.parametrize(
    ("method", "lie", "told"),
    [
        ("size", lambda *_: 5, "write: the file has 5 bytes after 16777216 were written"),
        ("names", lambda *_: ["a"], "list: a new file is missing in the list of 1 files"),
        (
            "copy_out",
            lambda _, __, path: path.write_bytes(b"x"),
            "read: the file has other bytes than were written",
        ),
        (
            "read",
            lambda *_: b"6",
            "small files: a file that was replaced 7 times still has b'6'",
        ),
        (
            "remove",
            lambda *_: None,
            "delete: 2 files are still listed after they were deleted",
        ),
    ],
)
def test_nothing_is_tried_after_a_folder_that_does_not_do_what_it_says(
    method: str,
    lie: Callable[..., object],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalFolder, method, lie)
    *others, last = trial.try_folder(str(tmp_path))
    assert {each.status for each in others} == {"ok"}
    name, detail = told.split(": ")
    assert last == DoctorFinding(name, "wrong", f"OSError: {detail}", "use another place")
