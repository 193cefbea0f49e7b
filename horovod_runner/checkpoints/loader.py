"""Loads what a training resumes from: the newest checkpoint or commit, the same on all ranks.

A checkpoint is read on rank 0 and broadcast. Of a sharded one, each rank reads what it needs. A
commit is read on each host; if a host lacks it, the lowest rank that has it broadcasts it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from horovod_runner.checkpoints import checkpoint, formats
from horovod_runner.checkpoints.commits import Commit, Commits, Held, decode_commit
from horovod_runner.checkpoints.problems import UnreachableError
from horovod_runner.common.text import count_text, ranks_text
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.wire import collectives
from horovod_runner.wire.collectives import ALONE, SmallCollectives
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker

_BROADCAST_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint or commit to resume from.

    Attributes:
        state: as it was given to ``save_checkpoint`` or ``commit``; tensors are on the CPU, a
            folder is the path of a temporary copy. With ``load_checkpoint(into=state)`` it is the
            state that was given there.
        step: as given there.
        metrics: as given there.
    """

    state: Any = field(repr=False)
    step: int
    metrics: Mapping[str, float | int]


def load(
    plan: CheckpointPlan,
    rank: int,
    size: int,
    warn: Callable[[str], None],
    *,
    commits: Commits | None = None,
    keeps: bool = False,
    into: Callable[[], Mapping[str, Any]] | None = None,
    connect: Callable[[], SmallCollectives] = collectives.connected,
) -> LoadedCheckpoint | None:
    """Load the newest of checkpoint and commit. All ranks call this.

    Args:
        plan: the run's.
        rank: this rank's number.
        size: the number of ranks.
        warn: called with a line for the user if a checkpoint is damaged.
        commits: those of this host; None in a run without commits.
        keeps: whether this rank keeps a commit that its host lacks: one rank of each host.
        into: returns the state that a sharded checkpoint is loaded into; None: a new one.
        connect: returns the collectives of the ranks.

    Returns:
        The checkpoint; None if this training is new.

    Raises:
        CheckpointError: all checkpoints are damaged, and there is no commit; or their folder cannot
            be read.
        RuntimeError: the ranks are not connected yet.
    """
    # Also in a new training: a main that calls this too early should fail now, not at a restart.
    ranks = ALONE if size == 1 else connect()
    checkpoints = _Loading(plan, rank, ranks, warn, into)
    if commits is None:
        return checkpoints.load(plan.resume)
    with commits.hold() as held:
        newest, owners = _agree(held, ranks, size)
        newer = [
            marker
            for marker in plan.resume
            if newest is None or newest.is_older_than(marker, plan.token)
        ]
        loaded = replace(checkpoints, required=newest is None).load(newer)
        if loaded is not None or newest is None:
            return loaded
        if len(owners) == size:
            assert held is not None  # noqa: S101 - all ranks have it
            return _loaded(held.commit, held.read())
        own = held if rank in owners else None
        return _share_commit(own, owners[0], rank, ranks, commits if keeps else None)


def _agree(
    held: Held | None, ranks: SmallCollectives, size: int
) -> tuple[Commit | None, Sequence[int]]:
    """The age of the newest commit of all hosts, as a commit, and the ranks that have that commit.

    None if no host has one.
    """
    ours = [0, 0, 0]
    if held is not None:
        ours = [held.commit.attempt, held.commit.number, held.commit.next_checkpoint]
    gathered = ranks.gather(ours)
    # Of one commit, only the ranks that call save_checkpoint know of all checkpoints before it.
    attempt, number, next_checkpoint = max(gathered)
    owners = [rank for rank in range(size) if gathered[rank][:2] == [attempt, number]]
    newest = Commit(attempt, number, 0, next_checkpoint) if attempt else None
    return newest, owners


@dataclass(frozen=True)
class _Loading:
    """Loads a checkpoint, with the arguments of :func:`load`. All ranks make the same calls."""

    plan: CheckpointPlan
    rank: int
    ranks: SmallCollectives
    warn: Callable[[str], None]
    into: Callable[[], Mapping[str, Any]] | None
    required: bool = True  # it is an error if no checkpoint is intact

    def load(self, markers: Sequence[Marker]) -> LoadedCheckpoint | None:
        """Load the latest intact checkpoint of some, the latest first; None if there is none."""
        if not markers:
            return None
        left = markers
        while True:
            with ExitStack() as cleanup:
                chosen = self._choose(left, cleanup)
                if chosen is None:
                    return None
                path, marker = chosen
                if path is not None:
                    return _loaded(marker, formats.read(marker.kind, path))
            left = left[left.index(marker) + 1 :]
            state = self._load_sharded(marker, self._instead(left))
            if state is not None:
                return _loaded(marker, state)

    def _choose(
        self, markers: Sequence[Marker], cleanup: ExitStack
    ) -> tuple[Path | None, Marker] | None:
        """The latest intact checkpoint, and its file on this host; None for that of a sharded one.

        Rank 0 finds out which one is intact, and broadcasts that and the file.
        """
        ranks = self.ranks
        if self.rank == 0:
            intact = self._latest_intact(markers, cleanup)
            if ranks is not ALONE:  # nobody else waits for the file
                index = len(markers) if intact is None else markers.index(intact[1])
                ranks.broadcast(index.to_bytes(8, "little"), 8)
                if intact is not None and intact[0] is not None:
                    _send_file(intact[0], ranks)
            return intact
        index = int.from_bytes(ranks.broadcast(b"", 8), "little")
        if index == len(markers):
            return None
        marker = markers[index]
        if marker.kind == "sharded":
            return None, marker
        return _receive_file(marker, ranks, cleanup), marker

    def _latest_intact(
        self, markers: Sequence[Marker], cleanup: ExitStack
    ) -> tuple[Path | None, Marker] | None:
        """On rank 0: the latest checkpoint that is not damaged; None if none is.

        A sharded one has no file, and only its metadata are checked.
        """
        if self.plan.fetched:  # the task has verified it
            path = Path(self.plan.fetched)
            return next(((path, marker) for marker in markers if marker.name == path.name), None)
        folder = open_folder(self.plan.folder)
        for at, marker in enumerate(markers, start=1):
            try:
                if marker.kind == "sharded":
                    from horovod_runner.checkpoints.sharded import reader

                    reader.read_metadata(folder, marker)
                    return None, marker
                return cleanup.enter_context(checkpoint.intact_file(folder, marker)), marker
            except UnreachableError:
                raise  # the earlier ones are in the same folder
            except CheckpointError as error:
                self.warn(f"HorovodRunner: {error}{self._instead(markers[at:])}")
        if not self.required:
            return None
        raise CheckpointError(
            f"no checkpoint in {self.plan.folder} is intact: "
            f"{count_text(len(self.plan.resume), 'checkpoint')} damaged or gone. Remove what is "
            "left, or name another checkpoint_dir, to start a new training"
        )

    def _instead(self, earlier: Sequence[Marker]) -> str:
        """What is used instead of a damaged checkpoint, as a sentence; empty if nothing is."""
        if earlier:
            return " The earlier one is used."
        return "" if self.required else " The commit is used."

    def _load_sharded(self, marker: Marker, instead: str) -> Any:
        """What this rank needs of a sharded checkpoint; None, and a warning, if it is damaged."""
        from horovod_runner.checkpoints.sharded import reader

        folder = open_folder(self.plan.folder)
        # First, because into() may call collectives: all ranks call it, or none.
        hidden = self._ranks_where(not checkpoint.has_probe(folder, self.plan.token))
        if hidden:
            who = f"{ranks_text(hidden).capitalize()} do{'es' * (len(hidden) == 1)}"
            raise not_shared(self.plan, marker, who)
        into = None if self.into is None else self.into()
        state, problem = None, ""
        try:
            state = reader.load(folder, marker, into)
        except (UnreachableError, reader.MisfitError):
            raise
        except CheckpointError as error:
            problem = str(error)
        damaged = self._ranks_where(bool(problem))
        if not damaged:
            return state
        if self.rank == damaged[0]:
            self.warn(f"HorovodRunner: {problem}{instead}")
        return None

    def _ranks_where(self, condition: bool) -> list[int]:
        found = self.ranks.gather([int(condition)])
        return [rank for rank, (holds,) in enumerate(found) if holds]


def not_shared(plan: CheckpointPlan, marker: Marker, who: str) -> CheckpointError:
    """The error of a sharded checkpoint that ``who``, a subject with "does" or "do", cannot see."""
    return CheckpointError(
        f"the latest checkpoint, {marker.name} (step {marker.step}), is sharded: each rank reads "
        f"its part. {who} not see its folder, {plan.folder}. Set checkpoint_dir to a folder that "
        "the driver and all hosts share, or to a URL (s3://...)."
    )


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """The positions and sizes of the pieces in which so many bytes are broadcast."""
    for at in range(0, size, _BROADCAST_BYTES):
        yield at, min(size - at, _BROADCAST_BYTES)


def _send_file(path: Path, ranks: SmallCollectives) -> None:
    with path.open("rb") as file:
        for _, count in _pieces(path.stat().st_size):
            ranks.broadcast(file.read(count), count)


def _receive_file(marker: Marker, ranks: SmallCollectives, cleanup: ExitStack) -> Path:
    path = Path(cleanup.enter_context(temporary_folder("checkpoint"))) / marker.name
    with path.open("xb") as file:
        for _, count in _pieces(marker.size):
            file.write(ranks.broadcast(b"", count))
    return path


def _loaded(saved: Commit | Marker, state: Any) -> LoadedCheckpoint:
    return LoadedCheckpoint(state, saved.step, dict(saved.metrics))


def _share_commit(
    held: Held | None, root: int, rank: int, ranks: SmallCollectives, keep: Commits | None
) -> LoadedCheckpoint:
    """Broadcast a commit from rank ``root``, which has it. All ranks call this.

    A rank that lacks it (``held`` is None) may ``keep`` it, in case the sender's host is lost.
    """
    text, memory = b"", b""
    if held is not None and rank == root:
        text, memory = msgspec.msgpack.encode(held.commit), held.memory
    count = int.from_bytes(ranks.broadcast(len(text).to_bytes(8, "little"), 8, root), "little")
    # This rank's own may have another size: a state may differ by rank.
    commit = decode_commit(ranks.broadcast(text, count, root))
    if held is not None:
        for at, count in _pieces(commit.size):
            ranks.broadcast(bytes(memory[at : at + count]), count, root)
        return _loaded(held.commit, held.read())
    with ExitStack() as stack:
        try:
            if keep is None:
                raise BlockingIOError("another rank of this host keeps it")
            received = stack.enter_context(keep.writing(commit, wait=False))
        except (BlockingIOError, CheckpointError):  # without room, the next commit says so
            received = mmap.mmap(-1, max(commit.size, 1))
        for at, count in _pieces(commit.size):
            received[at : at + count] = ranks.broadcast(b"", count, root)
        return _loaded(commit, Held(commit, received).read())
