"""Saves checkpoints in a thread, while the training continues.

    save_checkpoint --copy--> Saver's thread --file----> checkpoint_dir, if this host sees it
                                             `-pieces--> otherwise: pipe, channel, driver's disk

Rank 0 saves. Of a sharded checkpoint each rank writes a part, and rank 0 completes it.

While a checkpoint is written, a byte of the outcome file is locked: a task that is told to end its
rank waits for that (task/relay.py).

The training waits while the state is copied. It also waits for the previous checkpoint if that is
still being written: there is one copy at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from horovod_runner.checkpoints import checkpoint, owner
from horovod_runner.checkpoints.retention import surplus
from horovod_runner.checkpoints.snapshot import Copier, Snapshot
from horovod_runner.common.clocks import process_clock
from horovod_runner.common.descriptors import lock_byte, unlock_byte, write_all
from horovod_runner.common.files import file_sha256, is_full
from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.numbers import check_saved
from horovod_runner.common.threads import start_thread
from horovod_runner.host.folders.folder import PART
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.problems import FULL_TEMPORARY, describe
from horovod_runner.host.scratch import TEMPORARY_VARIABLE, RunFolder, scratch_folder
from horovod_runner.wire import events, messages
from horovod_runner.wire.framing import PIECE_BYTES, frame
from horovod_runner.wire.job_file import CHECKPOINT_BYTE, CheckpointPlan
from horovod_runner.wire.marker import Kind, Marker, file_name

if TYPE_CHECKING:
    from horovod_runner.checkpoints.sharded.writer import OwnPart, Sharder


class Saver:
    """Saves checkpoints; on rank 0 only, except those that are sharded.

    ``descriptor`` is that of the pipe to the task, which forwards messages to the driver.
    ``outcome_file`` is that of the outcome, or None where no task could end this process.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        descriptor: int,
        outcome_file: int | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._limits = limits
        self._plan = plan
        self._descriptor = descriptor
        self._outcome_file = outcome_file
        self._copier = Copier()
        self._number = plan.next_number
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._folder = open_folder(plan.folder)
        self._direct = checkpoint.has_probe(self._folder, plan.token)
        self._kept = ExitStack()
        self._held = ExitStack()  # the lock, while a thread writes
        self._scratch: Path | None = None
        self._sharder: Sharder | None = None

    def save(self, state: Any, step: Any, metrics: Mapping[str, Any] | None) -> None:
        """Copy the state, and start a thread that writes it.

        Raises:
            TypeError: the state holds a value that cannot be stored, a metric is not a number, or
                the step is not a whole number.
            ValueError: the step is below 0.
        """
        # A call that fails takes a number, too: every rank counts the calls (worker/api.py).
        number, self._number = self._number, self._number + 1
        step, numbers = check_saved(step, metrics)
        with self._lock, self._unstopped() as unstopped:
            try:
                snapshot = self._copier.copy(state)
            except OSError as error:
                if not is_full(error):
                    raise
                # A folder, or a Keras model without a clone: copied to a temporary file.
                self._send_unsaved(step, error, scratch_folder(), FULL_TEMPORARY)
                return
            marker = self._draft(snapshot.kind, number, step, numbers)
            self._start(unstopped, self._write, snapshot, marker)

    def save_sharded(
        self,
        state: Any,
        step: Any,
        metrics: Mapping[str, Any] | None,
        *,
        calls: int,
        rank: int,
        size: int,
    ) -> None:
        """Copy this rank's part of the state, and start a thread that writes it. On all ranks.

        ``calls`` is how often ``save_checkpoint`` was called on this rank, with this call.

        Raises:
            CheckpointError: a rank does not see the folder, or the ranks save different
                checkpoints.
            RuntimeError: the ranks are not connected yet.
            TypeError, ValueError: as for :meth:`save`.
        """
        number = self._plan.next_number + calls - 1
        self._number = number + 1
        step, numbers = check_saved(step, metrics)
        with self._lock:
            self.finish()
            if self._sharder is None:
                from horovod_runner.checkpoints.sharded.writer import Sharder

                self._sharder = Sharder(self._plan, rank, size, self._limits, sees=self._direct)
            part = self._sharder.take(state, number, step)
            marker = self._draft("sharded", number, step, numbers)
            # Not before: a rank may wait for a lost one in take.
            with self._unstopped() as unstopped:
                self._start(unstopped, self._write_part, part, rank, marker)

    @contextmanager
    def _unstopped(self) -> Iterator[ExitStack]:
        """Wait for the previous checkpoint; then keep the task from ending this process.

        Until the end of the block, or of the thread that takes the lock with ``pop_all``.
        """
        self.finish()
        with ExitStack() as stack:
            if self._outcome_file is not None:
                lock_byte(self._outcome_file, CHECKPOINT_BYTE)
                stack.callback(unlock_byte, self._outcome_file, CHECKPOINT_BYTE)
            yield stack

    def _start(self, unstopped: ExitStack, write: Callable[..., None], *args: Any) -> None:
        self._held = held = unstopped.pop_all()

        def run() -> None:
            with held:
                write(*args)

        self._thread = start_thread("saver", run)

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait until the last checkpoint is written, and remove the scratch folder."""
        self.finish()
        self._kept.close()

    def _draft(self, kind: Kind, number: int, step: int, metrics: dict[str, float | int]) -> Marker:
        plan = self._plan
        name = file_name(number, step, plan.token, kind)
        return Marker(name, number, step, kind, 0, "", plan.token, plan.attempt, metrics=metrics)

    def _write(self, snapshot: Snapshot, marker: Marker) -> None:
        local = self._folder.local(marker.name) if self._direct else None
        part = None
        try:
            part = (local.parent if local else self._scratch_folder()) / f"{PART}{marker.name}"
            snapshot.write(part)
            marker = _written(marker, part.stat().st_size, file_sha256(part))
            if self._direct:
                checkpoint.publish(self._folder, part, marker, owned=self._plan.owned)
            else:
                self._stream(part, marker)
            self._send(events.Saved(0, marker))
            self._prune()
        except Exception as error:
            _discard(part)  # first: the error says how much is free
            folder = None if part is None else part.parent
            self._send_unsaved(marker.step, error, folder, None if local else FULL_TEMPORARY)
        finally:
            _discard(part)

    def _write_part(self, part: OwnPart, rank: int, marker: Marker) -> None:
        began = time.monotonic()
        part.write(self._folder, marker.name, self._scratch_folder)
        if rank:
            return
        # The parts are of about the same size. A rank that takes much longer may be lost.
        patience = max(self._limits.checkpoint_parts, 2 * (time.monotonic() - began))
        timer = threading.Timer(patience, self._held.close)
        timer.daemon = True
        timer.start()
        self._held.callback(timer.cancel)
        try:
            marker = _written(marker, *part.complete(self._folder, marker.name))
            checkpoint.publish(self._folder, None, marker, owned=self._plan.owned)
        except Exception as error:
            with suppress(Exception):
                part.discard(self._folder, marker.name)
            self._send_unsaved(marker.step, error, self._folder.local(""))
            return
        with suppress(OSError):
            self._send(events.Saved(0, marker))
        self._prune()

    def _send_unsaved(
        self, step: int, error: Exception, folder: Path | None, full: str | None = None
    ) -> None:
        """Tell the driver why a checkpoint could not be written; a later run may be the reason.

        Arguments are those of :func:`describe`.
        """
        why = ""
        if self._plan.owned:
            with suppress(Exception):
                why = owner.taken_from(self._folder, self._plan.token)
        why = why or describe(error, folder=folder, full=full)
        with suppress(OSError):
            self._send(events.Unsaved(0, step, why))

    def _scratch_folder(self) -> Path:
        if temporary := os.environ.get(TEMPORARY_VARIABLE):
            return Path(temporary)  # the task removes what this process leaves there
        if self._scratch is None:
            self._scratch = self._kept.enter_context(RunFolder(self._plan.token)).path
        return self._scratch

    def _prune(self) -> None:
        plan = self._plan
        if not self._direct or plan.config.num_to_keep is None:
            return
        with suppress(Exception):  # it is tried again after the next checkpoint
            markers = checkpoint.find_complete(self._folder)
            ours = [marker for marker in markers if plan.lineage or marker.run_id == plan.token]
            for marker in surplus(ours, plan.config):
                checkpoint.remove(self._folder, marker)

    def _stream(self, path: Path, marker: Marker) -> None:
        with path.open("rb", buffering=0) as file:
            offset = 0
            while data := file.read(PIECE_BYTES):
                self._send(messages.FilePart(0, marker.name, offset, data))
                offset += len(data)

    def _send(self, message: events.Message) -> None:
        write_all(self._descriptor, frame(messages.encode(message)))


def _discard(part: Path | None) -> None:
    if part is not None:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _written(marker: Marker, size: int, sha256: str) -> Marker:
    """The marker of a checkpoint that was written at this moment."""
    return msgspec.structs.replace(marker, size=size, sha256=sha256, saved_at=process_clock())
