"""Commits: the latest state of a training, in a folder in the memory of each host.

    state-0, state-1    the latest two states; the next commit overwrites the older one
    commit              metadata, replaced in one step at the end of a commit

So a rank that is killed in the middle of a commit leaves the earlier one. The files belong to the
task beside the rank: they stay when the rank is killed. A lock on a state keeps it from being
overwritten while it is read; the kernel releases the lock of a killed process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from horovod_runner.checkpoints import formats, packed
from horovod_runner.checkpoints.keras_copy import is_keras_model
from horovod_runner.checkpoints.packed import Memory, StateLayout
from horovod_runner.checkpoints.snapshot import pack_folder
from horovod_runner.common.text import bytes_text, sizes_text
from horovod_runner.errors import CheckpointError
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.wire.marker import SUFFIXES, Marker

_MARKER: Final = "commit"
_PART: Final = ".part-"
# Files grow by this much, so that a state that grows by a few bytes needs no new memory.
_STEP_BYTES: Final = 1 << 20


class Commit(msgspec.Struct, frozen=True):
    """The metadata of a commit."""

    attempt: int  # 1-based number of the launch within the run
    number: int  # 1-based number of the commit within the attempt
    step: int
    next_checkpoint: int  # the number that the next checkpoint of this attempt gets
    metrics: dict[str, int | float] = {}
    kind: Literal["packed", "bytes", "keras", "folder"] = "packed"
    size: int = 0  # in bytes
    tree_at: int = 0  # the position of the tree in a packed state
    crc: int = 0  # the CRC-32 of that tree
    slot: int = 0  # the file that it is in, 0 or 1

    @property
    def order(self) -> tuple[int, int]:
        """Later commits have a higher one."""
        return self.attempt, self.number

    def is_older_than(self, marker: Marker, run_id: str) -> bool:
        """Whether a checkpoint was saved after this commit; those of other runs were not."""
        later = (marker.attempt, marker.number) >= (self.attempt, self.next_checkpoint)
        return marker.run_id == run_id and later


decode_commit: Final = msgspec.msgpack.Decoder(Commit).decode


class Held(NamedTuple):
    """A commit that no process overwrites while it is held."""

    commit: Commit
    memory: Memory  # its state; writing to it changes nothing

    def read(self) -> Any:
        """Read the state. The result shares no memory with the commit.

        Raises:
            CheckpointError: the framework that it needs is not installed here.
        """
        commit, memory = self
        if commit.kind == "bytes":
            return bytes(memory[: commit.size])
        if commit.kind == "packed":
            try:
                return packed.read(memory, commit.tree_at, commit.size)
            except ImportError as error:
                raise CheckpointError(f"the commit cannot be read here: {error}.") from error
        with temporary_folder("commit") as folder:
            path = Path(folder) / f"state{SUFFIXES[commit.kind]}"
            path.write_bytes(memoryview(memory)[: commit.size])
            return formats.read(commit.kind, path)


class Commits:
    """The commits of a host, in a folder that exists. One process writes, all may read."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._slots = [_Slot(self._folder / f"state-{slot}") for slot in range(2)]

    def latest(self) -> Commit | None:
        """The metadata of the latest complete commit; None if there is none."""
        try:
            commit = decode_commit((self._folder / _MARKER).read_bytes())
            if commit.size <= self._slots[commit.slot].path.stat().st_size:
                return commit
        except (FileNotFoundError, msgspec.DecodeError):
            pass
        return None

    @contextmanager
    def hold(self) -> Iterator[Held | None]:
        """Hold the latest commit; None if there is none, or it is damaged."""
        with ExitStack() as stack:
            held = None
            while (commit := self.latest()) is not None:
                file = stack.enter_context(self._slots[commit.slot].path.open("rb"))
                fcntl.flock(file, fcntl.LOCK_SH)
                again = self.latest()
                if again is not None and again.order == commit.order:
                    # It was not overwritten before it was locked.
                    memory = mmap.mmap(file.fileno(), commit.size, access=mmap.ACCESS_COPY)
                    stack.callback(_close, memory)
                    tree = memory[commit.tree_at : commit.size] if commit.kind == "packed" else b""
                    held = Held(commit, memory) if zlib.crc32(tree) == commit.crc else None
                    break
            yield held

    def write(self, state: Any, commit: Commit) -> None:
        """Commit a state; of its metadata, kind, size and what follows are filled in here.

        Raises:
            CheckpointError: there is no room for it; the earlier commit stays.
            TypeError: the state holds a value that cannot be stored.
        """
        if isinstance(state, (bytes, bytearray, memoryview)):
            view = memoryview(state).cast("B")
            with self.writing(replace(commit, kind="bytes", size=view.nbytes)) as memory:
                memory[: view.nbytes] = view
        elif isinstance(state, (str, os.PathLike)) or is_keras_model(state):
            self._write_file(state, commit)
        else:
            layout = StateLayout(state)
            commit = replace(
                commit, size=layout.size, tree_at=layout.tree_at, crc=zlib.crc32(layout.tree)
            )
            with self.writing(commit) as memory:
                layout.copy_to(memory)

    def _write_file(self, state: Any, commit: Commit) -> None:
        kind: Literal["keras", "folder"] = "keras" if is_keras_model(state) else "folder"
        part = self._folder / f"{_PART}file{SUFFIXES[kind]}"
        try:
            if kind == "keras":
                state.save(part)
            else:
                with part.open("wb") as packing:
                    pack_folder(Path(state), packing)
            with part.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                with self.writing(replace(commit, kind=kind, size=size)) as memory:
                    file.readinto(memoryview(memory)[:size])
        except OSError as error:
            raise self._no_room(error) from error
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def writing(self, commit: Commit, *, wait: bool = True) -> Iterator[Memory]:
        """Memory for a new commit, which counts from the end of the block on.

        It does not count if a later one is there: a rank of an earlier attempt may still be ending.

        Raises:
            BlockingIOError: another process writes, and this one does not ``wait``.
            CheckpointError: there is no room for it.
        """
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            latest = self.latest()
            number = 0 if latest is None else 1 - latest.slot
            self._make_room(commit.size)
            with self._slots[number].locked() as memory:
                yield memory
                if latest is None or latest.order <= commit.order:
                    self._mark(replace(commit, slot=number))
        finally:
            os.close(folder)

    def _make_room(self, size: int) -> None:
        # Both files now: if the memory is too small, the first commit fails, and not a later one.
        growth = sum(slot.growth(size) for slot in self._slots)
        if growth > shutil.disk_usage(self._folder).free:
            raise self._too_small(size, growth)
        try:
            for slot in self._slots:
                slot.grow(size)
        except OSError as error:
            raise self._too_small(size, growth, f" ({error})") from error

    def _mark(self, commit: Commit) -> None:
        part = self._folder / f"{_PART}{_MARKER}"
        try:
            part.write_bytes(msgspec.msgpack.encode(commit))
            part.replace(self._folder / _MARKER)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._no_room(error) from error

    def _too_small(self, size: int, growth: int, why: str = "") -> CheckpointError:
        state, more, free = sizes_text(size, growth, shutil.disk_usage(self._folder).free)
        return self._no_room(f"a state of {state} needs another {more}{why}", free)

    def _no_room(self, reason: object, free: str = "") -> CheckpointError:
        free = free or bytes_text(shutil.disk_usage(self._folder).free)
        return CheckpointError(
            f"commit has no room in {self._folder}: {reason}, and {free} are free. Commits "
            "take twice the state's size in the memory of each host. Give containers more shared "
            "memory (docker run --shm-size=..., in Kubernetes an emptyDir with medium: Memory at "
            "/dev/shm), or call save_checkpoint in place of commit."  # noqa: S108
        )


class _Slot:
    """A file for states, and its memory in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._memory: Memory = None

    def growth(self, size: int) -> int:
        """By how many bytes the file has to grow for a state of that size."""
        try:
            return max(0, _rounded(size) - self.path.stat().st_size)
        except FileNotFoundError:
            return _rounded(size)

    def grow(self, size: int) -> None:
        """Reserve memory for a state of that size."""
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self.growth(size):
            # A write to a page that does not exist yet would end the process if memory is full.
            os.posix_fallocate(self._file, 0, _rounded(size))

    @contextmanager
    def locked(self) -> Iterator[Memory]:
        """The file's memory, while no process reads it."""
        size = os.fstat(self._file).st_size
        if self._memory is None or len(self._memory) != size:
            if self._memory is not None:
                _close(self._memory)
            # All pages are made known to this process at once, not one after the other.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(self._file, size, flags)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self._memory
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _rounded(size: int) -> int:
    return -(-max(size, 1) // _STEP_BYTES) * _STEP_BYTES


def _close(memory: Memory) -> None:
    with suppress(BufferError):  # a tensor still refers to it
        memory.close()
