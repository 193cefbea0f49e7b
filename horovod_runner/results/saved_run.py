"""The logs of this user's runs, for ``horovod-runner report`` and ``load_run``.

    <state>/horovod_runner/records/<run id>.run    its log, see `run_log`; of the latest runs
                                   <run id>-rank-3.torch.json.gz    traces of its ranks, which are
                                                                    deleted with it

<state> is ``$XDG_STATE_HOME`` or ~/.local/state. Only the user may read the files.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host.folders.folder import local_path
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.results import run_log
from horovod_runner.results.private_files import state_folder
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import RunState
from horovod_runner.wire.events import Status

SUFFIX: Final = ".run"
#: In messages instead of an id that is "", as from a variable of the shell that is not set.
NO_ID: Final = "with an empty id"
# Older records are deleted where there are more, or where all of them are larger.
_KEPT_RUNS: Final = 50
_KEPT_BYTES: Final = 1 << 30
# Traces without a record are deleted after this time: their run may still go on.
_LEFT_SECONDS: Final = 7 * 86400.0


def end_of(run_id: str) -> tuple[Status, str] | None:
    """How a run of this user ended, and the error of its last attempt; None without a record."""
    with suppress(OSError, HorovodRunnerError):
        _, state = run_log.summary(path_of(run_id))
        return state.status, state.attempts[-1].error if state.attempts else ""
    return None


def folder() -> Path:
    """The folder of this user's records."""
    return state_folder() / "records"


def path_of(run_id: str) -> Path:
    """The file for the log of a run."""
    return folder() / f"{run_id}{SUFFIX}"


def new_path(run_id: str, most_runs: int = _KEPT_RUNS) -> Path | None:
    """The file for the log of a run, None without a home folder; deletes the oldest ones."""
    with suppress(HorovodRunnerError):
        _delete_old(most_runs - 1)
        return path_of(run_id)
    return None


def kept() -> list[Path]:
    """The records of this user's runs, the latest first."""
    found = []
    with suppress(HorovodRunnerError):
        for path in folder().glob(f"*{SUFFIX}"):
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def summaries() -> list[tuple[float, RunState]]:
    """The kept records in short, each with its time, the latest first; others are left out."""
    found = []
    for path in kept():
        with suppress(OSError, HorovodRunnerError):
            found.append(run_log.summary(path))
    return found


def record_at(path: str) -> Path | None:
    """The file of a path or URL on this machine; None if there is none."""
    local = local_path(path)
    return local if local is not None and local.is_file() else None


def find(run: str | None = None) -> Path:
    """The record of a run.

    Args:
        run: its id or the start of it, or the path of a record; None: the latest.

    Raises:
        HorovodRunnerError: there is none, or several begin so.
    """
    if run is not None and (path := record_at(run)) is not None:
        return path
    records = kept()
    chosen = [path for path in records if run is None or (run and path.stem.startswith(run))]
    if not chosen:
        there = ", ".join(path.stem for path in records[:5]) or "none"
        which = "no run" if run is None else f"no run {run or NO_ID}"
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
        run: the run's id or the start of it, or the path or URL of a record; None: the latest run.

    Returns:
        What ``runner.last_run`` was when the run ended. Its checkpoints can be loaded where their
        files still are.

    Raises:
        HorovodRunnerError: there is no such run, or several begin so.
    """
    name = None if run is None else os.fspath(run)
    if name is not None and local_path(name) is None:
        return _load_url(name)
    return run_log.load(find(name))


def _load_url(url: str) -> Run:
    """Read the record that a driver in a container has left with its checkpoints."""
    folder, _, name = url.rpartition("/")
    with temporary_folder("record") as here:
        try:
            open_folder(folder, check=True).copy_out(name, Path(here, name))
        except FileNotFoundError as error:
            raise HorovodRunnerError(f"there is no record of a run at {url}") from error
        return run_log.load(Path(here, name))


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
