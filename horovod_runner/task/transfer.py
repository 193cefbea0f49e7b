"""Copies files between a task and the driver: the checkpoint to resume from, and traces."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from horovod_runner.common.text import bytes_text
from horovod_runner.errors import CheckpointError
from horovod_runner.task.orders import receive
from horovod_runner.wire import events, messages
from horovod_runner.wire.framing import PIECE_BYTES
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.link import Link
from horovod_runner.wire.marker import Marker

_MAX_WAITING = 4  # pieces that the driver has not taken yet: they stay in memory


def fetch_checkpoint(
    plan: CheckpointPlan, link: Link, folder: Path, patience: float
) -> CheckpointPlan:
    """Make the checkpoint that rank 0 resumes from readable on this host; returns the new plan.

    It is copied from the driver only where this host does not see the checkpoint folder, and into
    the run's scratch folder. The driver sends a piece within ``patience`` seconds. Each checkpoint
    that is skipped is reported to the user.

    Raises:
        CheckpointError: the driver has no complete checkpoint, or does not answer; or the latest
            one is sharded.
        CalledOffError: the driver stopped the rank.
    """
    # Imported here: few tasks resume from anything.
    from horovod_runner.checkpoints import checkpoint, loader
    from horovod_runner.host.folders.opening import open_folder

    if checkpoint.has_probe(open_folder(plan.folder), plan.token):
        return plan
    problems = []
    for at, marker in enumerate(plan.resume, start=1):
        if marker.kind == "sharded":
            raise loader.not_shared(plan, marker, "The host of rank 0 does")
        problem = _fetch(marker, link, folder, patience)
        if not problem:
            return plan._replace(fetched=str(folder / marker.name))
        (folder / marker.name).unlink(missing_ok=True)
        problems.append(problem)
        if at < len(plan.resume):
            link.put(events.Log(0, f"HorovodRunner: {problem} The earlier one is used."))
    raise CheckpointError(
        f"no checkpoint in {plan.folder} could be fetched from the driver: {' '.join(problems)}"
    )


def _fetch(marker: Marker, link: Link, folder: Path, patience: float) -> str:
    """Copy a checkpoint to this host, piece by piece; returns the problem, or an empty text."""
    from horovod_runner.checkpoints import checkpoint
    from horovod_runner.host.folders.problems import FULL_TEMPORARY, describe

    offset, digest = 0, hashlib.sha256()
    try:
        with (folder / marker.name).open("wb") as file:
            while offset < marker.size:
                link.put(messages.Fetch(0, marker.name, offset))
                answer = _await_piece(link, marker.name, offset, patience)
                if answer.problem or not answer.data:
                    return answer.problem or f"{marker.name} was cut short at {offset} bytes."
                file.write(answer.data)
                digest.update(answer.data)
                offset += len(answer.data)
    except OSError as error:
        told = describe(error, folder=folder, full=FULL_TEMPORARY)
        return f"{marker.name} with {bytes_text(marker.size)} could not be copied: {told}"
    try:
        checkpoint.check_digest(digest.hexdigest(), marker)
    except CheckpointError as error:
        return str(error)
    return ""


def _await_piece(link: Link, name: str, offset: int, patience: float) -> messages.Fetched:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for message in receive(link, 0.5):
            if not isinstance(message, messages.Fetched):
                continue
            if (message.name, message.offset) == (name, offset):
                return message
    problem = f"the driver sent no piece of {name} within {patience:g} s."
    return messages.Fetched(name, offset, problem=problem)


def send_timeline(path: Path, link: Link, patience: float) -> None:
    """Send Horovod's timeline to the driver, also after the worker was killed.

    It does not exist if ``main`` never called hvd.init(). If the driver takes nothing for
    ``patience`` seconds, the rest is left out.
    """
    try:
        _send_file(path, 0, "timeline", link, patience)
    except FileNotFoundError:
        pass
    except OSError as error:
        text = f"Horovod's timeline cannot be read on rank 0's host: {error}"
        link.put_patiently(events.Log(0, text), patience)


def send_trace(path: str, rank: int, link: Link, patience: float) -> None:
    """Send a rank's trace to the driver, if there is one; the path is that of its WorkerJob."""
    for name in messages.TRACE_NAMES:
        file = Path(f"{path}.{name}")
        try:
            size = _send_file(file, rank, name, link, patience)
            if size is not None:  # it is complete
                link.put_patiently(messages.FilePart(rank, name, size, b""), patience)
            file.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            why = f"It cannot be read on the rank's host: {error}"
            link.put_patiently(events.Untraced(rank, why), patience)


def _send_file(path: Path, rank: int, name: str, link: Link, patience: float) -> int | None:
    """Send a file piece by piece; returns its size, or None if the driver takes no more."""
    offset = 0
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            if not link.put_patiently(messages.FilePart(rank, name, offset, data), patience):
                return None
            offset += len(data)
            while link.waiting >= _MAX_WAITING and not link.lost:
                link.wait(0.1)
    return offset
