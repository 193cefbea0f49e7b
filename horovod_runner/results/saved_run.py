"""Keeps the record of a run in a file, for ``horovod-runner report`` and ``load_run``.

    <state>/horovod_runner/records/<run id>.run    MessagePack; the latest runs of this user
                                   <run id>-rank-3.torch.json.gz    traces of its ranks, which are
                                                                    deleted with it

<state> is ``$XDG_STATE_HOME`` or ~/.local/state. Only the user may read the files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.files import is_full, write_problem
from horovod_runner.common.state import state_folder
from horovod_runner.common.text import without_password
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results.metrics_table import MetricRows, Metrics
from horovod_runner.results.run import Attempt, Line, Run, Status, Timings, TraceFile
from horovod_runner.results.slowness.profile import RunProfile, SavedProfile
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.messages import Controller
from horovod_runner.wire.slots import RankInfo

SUFFIX: Final = ".run"
#: What to do if the folder's disk is full.
MORE_ROOM: Final = "Free space there, or set XDG_STATE_HOME to a folder on another disk."
# Older records are deleted where there are more, or where all of them are larger.
_KEPT_RUNS: Final = 50
_KEPT_BYTES: Final = 1 << 30
# Traces without a record are deleted after this time: their run may still go on.
_LEFT_SECONDS: Final = 7 * 86400.0


_TAG: Final = "horovod_runner run 1"  # grows where older files cannot be read any more


class _Saved(msgspec.Struct, tag=_TAG):
    """The contents of the file."""

    run_id: str
    np: int | tuple[int, int]
    params: dict[str, Any]
    main: str
    where: str
    software: dict[str, str]
    status: Status
    attempts: list[Attempt]
    ranks: list[RankInfo]
    controller: Controller | None
    timings: Timings
    logs_cut: int
    lines: list[Line]
    metrics: list[MetricRows]
    profile: SavedProfile
    checkpoints: list[tuple[str, Marker]]  # each with its folder, without a password
    recorded: float = 0.0  # when the file was written
    traces: list[TraceFile] = []
    warnings: list[str] = []
    result_text: str = ""
    attempts_cut: int = 0


class Summary(msgspec.Struct, tag=_TAG):
    """A few fields of a record; see :class:`~horovod_runner.results.run.Run`."""

    run_id: str
    np: int | tuple[int, int]
    main: str
    where: str
    status: Status
    timings: Timings
    recorded: float = 0.0


# A record that is written while the run goes on never replaces that of its end.
_writing: Final = threading.Lock()
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Saved).decode
_decode_summary: Final = msgspec.msgpack.Decoder(Summary).decode


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run's record to a file that only this user can read; replaces it at once."""
    path = Path(path)
    with _writing:
        _save(run, path)


def _save(run: Run, path: Path) -> None:
    saved = _Saved(
        run.run_id,
        run.np,
        dict(run.params),
        run.main,
        run.where,
        dict(run.software),
        run.status,
        list(run.attempts),
        list(run.ranks),
        run.controller,
        run.timings,
        run.logs_cut,
        run.logs,
        run._metrics.saved(),
        run.profile.saved(),
        [(without_password(each.folder), each.marker) for each in run.checkpoints],
        run._clock(),
        list(run.traces),
        list(run.warnings),
        run.result_text,
        run.attempts_cut,
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb", opener=_private) as file:
            file.write(_encode(saved))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Run:
    """Read a run's record. What it says is as it was when the record was written.

    Raises:
        HorovodRunnerError: the file cannot be read, or is not such a record.
    """
    try:
        saved = _decode(Path(path).read_bytes())
    except OSError as error:
        raise HorovodRunnerError(f"the record of a run cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise HorovodRunnerError(
            f"{path} is not the record of a run, or one of another version of horovod_runner: "
            f"{error}"
        ) from error
    run = Run(
        saved.run_id,
        saved.np,
        saved.params,
        main=saved.main,
        where=saved.where,
        software=saved.software,
        status=saved.status,
        attempts=saved.attempts,
        attempts_cut=saved.attempts_cut,
        ranks=saved.ranks,
        controller=saved.controller,
        timings=saved.timings,
        logs_cut=saved.logs_cut,
        recorded=saved.recorded or Path(path).stat().st_mtime,
        profile=RunProfile.restored(saved.profile),
        traces=saved.traces,
        warnings=saved.warnings,
        result_text=saved.result_text,
        _metrics=Metrics.restored(saved.metrics),
        _checkpoints=[Checkpoint(folder, marker) for folder, marker in saved.checkpoints],
    )
    run._lines.extend(saved.lines)
    return run


class _End(msgspec.Struct, tag=_Saved.__struct_config__.tag):
    """How a run ended: a part of the file."""

    status: Status
    attempts: list[Attempt]


_decode_end: Final = msgspec.msgpack.Decoder(_End).decode


def end_of(run_id: str) -> tuple[Status, str] | None:
    """How a run of this user ended, and the error of its last attempt; None without a record."""
    with suppress(OSError, RuntimeError, msgspec.MsgspecError):
        data = (folder() / f"{run_id}{SUFFIX}").read_bytes()
        end = _decode_end(data)
        return end.status, end.attempts[-1].error if end.attempts else ""
    return None


def folder() -> Path:
    """The folder of this user's records."""
    return state_folder() / "records"


def keep(
    run: Run, most_runs: int = _KEPT_RUNS, notice: Callable[[str], None] = lambda _: None
) -> Path | None:
    """Write a run's record into :func:`folder`, and delete the oldest ones.

    Args:
        run: the run.
        most_runs: how many records are kept.
        notice: called with a text for the user if the disk is full.

    Returns:
        Where it is; None where the folder cannot be written.
    """
    try:
        records = folder()
        records.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = records / f"{run.run_id}{SUFFIX}"
        save(run, path)
        _make_latest(path)
        _delete_old(most_runs)
        return path
    except RuntimeError:  # Path.home() finds no home folder
        return None
    except OSError as error:
        if is_full(error):  # and no folder that is read-only: it is so by intention
            notice(
                f"the record of this run could not be written: {write_problem(error, records)}. "
                f"`horovod-runner report` and load_run do not find the run. {MORE_ROOM}"
            )
        return None


def kept() -> list[Path]:
    """The records of this user's runs, the latest first."""
    found = []
    with suppress(RuntimeError):
        for path in folder().glob(f"*{SUFFIX}"):
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def summaries() -> list[Summary]:
    """The kept records in short, the latest first; files that are none are left out."""
    found = []
    for path in kept():
        with suppress(OSError, msgspec.MsgspecError):
            summary = _decode_summary(path.read_bytes())
            summary.recorded = summary.recorded or path.stat().st_mtime
            found.append(summary)
    return found


def find(run: str | None = None) -> Path:
    """The record of a run.

    Args:
        run: its id or the start of it, or the path of a record; None: the latest.

    Raises:
        HorovodRunnerError: there is none, or several begin so.
    """
    if run is not None and Path(run).is_file():
        return Path(run)
    records = kept()
    chosen = [path for path in records if path.stem.startswith(run or "")]
    if not chosen:
        there = ", ".join(path.stem for path in records[:5]) or "none"
        which = "no run" if run is None else f"no run {run}"
        raise HorovodRunnerError(f"there is {which} in {folder()}; the latest: {there}")
    if run is not None and len(chosen) > 1 and chosen[0].stem != run:
        several = ", ".join(path.stem for path in chosen[:5])
        raise HorovodRunnerError(f"{run} may be {several}: write more of the id")
    return chosen[0]


def load_run(run: str | os.PathLike[str] | None = None) -> Run:
    """Read the record of an earlier run of this user on this machine.

        run = horovod_runner.load_run()  # the latest
        print(run.diagnose())

    The latest 50 runs are kept, in ~/.local/state/horovod_runner/records.

    Args:
        run: the run's id or the start of it, or the path of a record; None: the latest run.

    Returns:
        What ``runner.last_run`` was when the run ended. Its checkpoints can be loaded where their
        files still are.

    Raises:
        HorovodRunnerError: there is no such run, or several begin so.
    """
    return load(find(None if run is None else os.fspath(run)))


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _make_latest(path: Path) -> None:
    """Keep the records in the order of their writing, also if the clock was set back."""
    others = [other for other in kept() if other != path]
    with suppress(OSError, IndexError):
        latest = others[0].stat().st_mtime_ns
        if path.stat().st_mtime_ns <= latest:
            os.utime(path, ns=(latest + 1, latest + 1))


def _delete_old(most_runs: int) -> None:
    size = 0
    for number, path in enumerate(kept()):
        with suppress(OSError):
            files = [path, *path.parent.glob(f"{path.stem}-rank-*")]
            size += sum(file.stat().st_size for file in files)
            if number >= most_runs or (number and size > _KEPT_BYTES):
                for file in files:
                    file.unlink()
    for path in folder().glob("*-rank-*"):  # of a run whose driver was killed
        with suppress(OSError):
            record = path.with_name(f"{path.name.partition('-rank-')[0]}{SUFFIX}")
            if not record.exists() and path.stat().st_mtime < time.time() - _LEFT_SECONDS:
                path.unlink()
