"""Writes the traces of ranks on the driver's machine, as their pieces arrive."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from horovod_runner.common.descriptors import write_all
from horovod_runner.common.files import is_full, write_problem
from horovod_runner.common.text import memory_text
from horovod_runner.errors import DataError, HorovodRunnerError
from horovod_runner.host.scratch import RunFolder
from horovod_runner.results import saved_run
from horovod_runner.results.private_files import private, replaced
from horovod_runner.wire.events import TraceFile
from horovod_runner.wire.messages import MOST_TRACE_BYTES, TRACE_NAMES, FilePart

_KINDS: Final[dict[str, Literal["torch", "tensorflow"]]] = {
    "torch.json.gz": "torch",
    "tensorflow.zip": "tensorflow",
}


@dataclass
class Arrivals:
    """The traces of one attempt: ``<folder>/<run id>-rank-3.torch.json.gz``, for this user alone.

    A context manager. A trace for a folder of the user's is put together on a local disk: that
    folder may be on a store where files cannot be appended to.
    """

    run_id: str
    wanted: bool | str | os.PathLike[str]  # the option torch_profiler
    most_of_rank: int = MOST_TRACE_BYTES
    most: int = 512 << 20  # bytes of all ranks beside the run's record; not in a folder of the user

    def __post_init__(self) -> None:
        self._room = self.most if self.wanted is True else None
        self._kept = ExitStack()
        self._scratch: Path | None = None
        self._refused: set[int] = set()  # ranks whose trace could not be written
        self.count = 0

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove traces that have not arrived completely."""
        self._kept.close()

    def part(self, message: FilePart) -> TraceFile | None:
        """Write a piece of a trace.

        Returns:
            The file if it is complete now, otherwise None.

        Raises:
            OSError: it cannot be written; the unfinished file is removed.
            ValueError: no such file or piece is expected.
        """
        if self.wanted is False or message.name not in TRACE_NAMES:
            raise ValueError(f"a piece of {message.name!r}, which is not an expected file")
        if message.rank in self._refused:
            return None
        folder, part = Path(), None
        try:
            folder = self._folder()
            path = folder / f"{self.run_id}-rank-{message.rank}.{message.name}"
            part = (folder if self.wanted is True else self._local()) / f".{path.name}.part"
            self._append(part, message)
            if message.data:
                return None
            if self.wanted is True:
                part.replace(path)
            else:
                with replaced(path) as copy, part.open("rb") as file:
                    shutil.copyfileobj(file, copy, 1 << 20)
                part.unlink()
        except OSError as error:
            self._refused.add(message.rank)
            if part is not None:
                part.unlink(missing_ok=True)
            if not is_full(error):
                raise
            raise OSError(
                f"It could not be written: {write_problem(error, folder)}. Free space there, or "
                'name another folder: torch_profiler="DIR"'
            ) from error
        self.count += 1
        return TraceFile(message.rank, _KINDS[message.name], str(path))

    def _folder(self) -> Path:
        """The folder, which is created if it does not exist."""
        if not isinstance(self.wanted, bool):
            folder = Path(self.wanted)
            folder.mkdir(exist_ok=True)
            return folder
        try:
            folder = saved_run.folder()
        except HorovodRunnerError as error:  # this user has no home folder
            raise OSError(f'{error}: name a folder, torch_profiler="DIR"') from error
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _local(self) -> Path:
        """A folder on a local disk."""
        if self._scratch is None:
            try:
                folder = RunFolder(f"{self.run_id}-traces")
                self._scratch = self._kept.enter_context(folder).path
            except DataError as error:
                raise OSError(str(error)) from error
        return self._scratch

    def _append(self, part: Path, message: FilePart) -> None:
        size = len(message.data)
        if message.offset + size > self.most_of_rank:
            raise ValueError(f"the trace of rank {message.rank} is too large")
        if self._room is not None:
            if size > self._room:
                raise OSError(
                    f"The traces of all ranks have more than {memory_text(self.most)}, the limit "
                    'beside the record of a run. Name a folder: torch_profiler="DIR"'
                )
            self._room -= size
        mode = "ab" if message.offset else "wb"
        with open(part, mode, buffering=0, opener=private) as file:
            if file.seek(0, os.SEEK_END) != message.offset:
                raise ValueError(f"a piece of {message.name} does not follow the one before")
            write_all(file.fileno(), message.data)
