"""Compares what the ranks have and do, on the driver: hashes of weights, and notes."""

from __future__ import annotations

import time
from collections.abc import Callable

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.text import ranks_text
from horovod_runner.errors import SyncError
from horovod_runner.wire.measurements import Note
from horovod_runner.wire.messages import Weights

_MOST_WAITING = 100
_MOST_KEYS = 1000
_MOST_NOTES = 1000  # of a rank, with one kind and key
_ON_PURPOSE = "If each rank is to train a model of its own, set DebugConfig(weight_check=None)."


class SyncCheck:
    """Compares the n-th hashes of every rank with the n-th of rank 0."""

    def __init__(self, size: int) -> None:
        self._waiting: list[list[Weights]] = [[] for _ in range(size)]
        #: How often all ranks were compared.
        self.compared = 0

    def take(self, message: Weights) -> None:
        """Record a rank's hashes, and compare where all ranks have sent theirs.

        Raises:
            SyncError: they differ from rank 0's, or a rank checks far more often than another.
        """
        queue = self._waiting[message.rank]
        queue.append(message)
        if len(queue) > _MOST_WAITING:
            behind = next(rank for rank, sent in enumerate(self._waiting) if not sent)
            raise SyncError(
                f"rank {message.rank} checked its weights {len(queue)} times more often than rank "
                f"{behind}: call check_weights on every rank"
            )
        while all(self._waiting):
            self.compared += 1
            _compare([queue.pop(0) for queue in self._waiting])


def _compare(all_ranks: list[Weights]) -> None:
    first = all_ranks[0]
    when = "" if first.epoch is None else f" after epoch {first.epoch}"
    for other in all_ranks[1:]:
        if other.epoch != first.epoch:
            raise SyncError(
                f"rank {other.rank} checked its weights after epoch {other.epoch} and rank 0 "
                f"after epoch {first.epoch}: the ranks do not train the same epochs"
            )
        if len(other.digests) != len(first.digests):
            raise SyncError(
                f"rank {other.rank} has {len(other.digests)} weights{when}, and rank 0 has "
                f"{len(first.digests)}: they do not train the same model"
            )
        pairs = enumerate(zip(other.digests, first.digests, strict=True))
        differ = [index for index, (digest, first_digest) in pairs if digest != first_digest]
        if differ:
            name = first.names[differ[0]] if differ[0] < len(first.names) else "one"
            raise SyncError(
                f"the ranks' weights differ{when}: rank {other.rank} is the first that differs "
                f"from rank 0, in {name} ({len(differ)} of {len(first.digests)} weights). Either "
                "the gradients are not averaged (the optimizer is not the one that "
                "hvd.DistributedOptimizer returned; Lightning without strategy=HorovodStrategy()) "
                "or the ranks began with different weights (no broadcast of rank 0's before the "
                "first step)"
            )


class _Notes:
    """The notes of ranks with one kind and key; the n-th of each rank belong together."""

    def __init__(self, first: Note, now: float) -> None:
        self.latest = first
        self.since = now
        self.counts: dict[int, int] = {}
        self._first: dict[int, Note] = {}  # by number

    def add(self, note: Note) -> tuple[Note, Note] | None:
        """Add a note; returns it and the first one that arrived, by rank, if they differ."""
        number = self.counts.get(note.rank, 0)
        self.counts[note.rank] = number + 1
        self.latest = note
        first = self._first.setdefault(number, note)
        if first.value == note.value:
            return None
        return (first, note) if first.rank < note.rank else (note, first)


class NoteCheck:
    """Compares what the ranks' code did, and finds mistakes in it.

    Args:
        host_of: the host of a rank; empty if it is not known.
    """

    def __init__(
        self,
        size: int,
        host_of: Callable[[int], str],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._late = limits.late_feed
        self._clock = clock
        self._size = size
        self._host_of = host_of
        self._warn = warn
        self._notes: dict[tuple[str, str], _Notes] = {}
        self._warned: set[str] = set()

    def take(self, note: Note) -> None:
        """Record what a rank did, and warn if it does not fit what the other ranks did."""
        if note.kind == "mistake":
            self._warn_once(note.key, f"rank {note.rank}{_at(note)}: {note.value}")
            return
        key = (note.kind, note.key)
        if key not in self._notes and len(self._notes) >= _MOST_KEYS:
            return
        notes = self._notes.setdefault(key, _Notes(note, self._clock()))
        if notes.counts.get(note.rank, 0) >= _MOST_NOTES:
            return
        differing = notes.add(note)
        if note.kind == "file":
            self._compare_hosts(notes, note)
        elif differing:
            self._warn_of_difference(*differing)
        if note.kind == "feed":
            self._warn_of_ranks_behind(note)

    def finish(self) -> None:
        """Warn of feeds that not all ranks have read."""
        for (kind, _), notes in self._notes.items():
            if kind == "feed" and len(notes.counts) < self._size:
                self._warn_of_ranks_without(notes)

    def _warn_of_difference(self, first: Note, other: Note) -> None:
        if first.kind == "weights":
            if text := weights_differ(first, other):
                self._warn_once("weights", text)
            return
        name = first.key.partition("\n")[0]
        self._warn_once(
            f"feeds {name}",
            f"the ranks read {name} differently: rank {other.rank} reads {other.value}"
            f"{_at(other)}, and rank {first.rank} {first.value}{_at(first)}. A feed has one rank's "
            "part of the rows of each step, so rows come several times, or not at all, and ranks "
            "may wait for each other. Make the same feeds on all ranks, with the same options and "
            "seed, and load the same state on all.",
        )

    def _compare_hosts(self, notes: _Notes, note: Note) -> None:
        host = self._host_of(note.rank)
        ranks = [rank for rank in notes.counts if self._host_of(rank) == host]
        if len(ranks) > 1:
            if note.key.endswith("/"):
                what = f"write to the same folder of logs, {note.key}"
                then = "TensorBoard shows their curves as one. Write logs on one rank"
                instead = "give HorovodRunner sinks=[TensorBoardSink(folder)], and call report"
            else:
                what = f"write the same file, {note.key}"
                then = (
                    "they overwrite each other's, and a reader may find parts of several. Write it "
                    "on one rank"
                )
                instead = "call save_checkpoint on every rank, of which only rank 0 writes"
            self._warn_once(
                "folders" if note.key.endswith("/") else "files",
                f"{ranks_text(ranks)} of one host {what}{_at(note)}: {then}, under "
                f"`if hvd.rank() == 0:`; or {instead}.",
            )

    def _warn_of_ranks_behind(self, note: Note) -> None:
        """Warn if another rank has not read this rank's feed before, which began long ago."""
        name, _, number = note.key.partition("\n")
        before = int(number) - 1 if number.isdecimal() else 0
        notes = self._notes.get(("feed", f"{name}\n{before}"))
        if notes is None or len(notes.counts) == self._size or note.rank not in notes.counts:
            return
        if self._clock() - notes.since > self._late:
            self._warn_of_ranks_without(notes)

    def _warn_of_ranks_without(self, notes: _Notes) -> None:
        reading = ranks_text(list(notes.counts))
        without = ranks_text([rank for rank in range(self._size) if rank not in notes.counts])
        note = notes.latest
        name = note.key.partition("\n")[0]
        self._warn_once(
            f"feeds {name}",
            f"{reading} read {name}{_at(note)}, and {without} did not. A feed has one rank's part "
            f"of the rows, so {reading} did not see the whole dataset there, and feeds that are "
            "made later may differ by rank. Read it on all ranks; evaluate(feed, measure) gives "
            "the mean over all rows.",
        )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned and len(self._warned) < _MOST_KEYS:
            self._warned.add(key)
            self._warn(text)


def _at(note: Note) -> str:
    return f" at {note.where}" if note.where else ""


def weights_differ(first: Note, other: Note) -> str:
    """The warning that two ranks have different weights or learning rates, or "".

    Keras may name a weight otherwise on a rank that builds its layers in another order.

    Args:
        first: the note of the one with the lower number. Its key says when, and its value has a
            name and a digest of each weight, one a line, below a line with the optimizer's name, a
            tab and its learning rates.
        other: the other rank's.
    """
    (optimizer, rates), weights = _optimizer_and_weights(first)
    (their_optimizer, their_rates), theirs = _optimizer_and_weights(other)
    if rates != their_rates:
        return (
            f"rank {other.rank} has another learning rate than rank {first.rank} {first.key}"
            f"{_at(other)} ({their_rates or 'none'} and {rates or 'none'}), so the ranks train "
            "different models. Change it on every rank in the same way. A schedule that follows a "
            'loss needs the mean of all ranks: agree(loss, "mean"), or in Keras '
            f"hvd.callbacks.ReduceLROnPlateau. {_ON_PURPOSE}"
        )
    pairs = [
        (ours, their)
        for ours, their in zip(weights, theirs, strict=False)
        if ours.rpartition(" ")[2] != their.rpartition(" ")[2]
    ]
    if len(weights) != len(theirs) or optimizer != their_optimizer:
        return (
            f"rank {other.rank} trains {len(theirs)} weights and rank {first.rank} {len(weights)}, "
            f"or with another optimizer{_at(other)}: the ranks do not train the same model"
        )
    if not pairs:
        return ""
    name = pairs[0][0].rpartition(" ")[0]
    some = f"{name} and {len(pairs) - 1} more" if len(pairs) > 1 else name
    parallel = optimizer.startswith("DistributedDataParallel")
    if first.key.startswith("before"):
        remedy = (
            "Load weights on every rank, or before DistributedDataParallel is made, which "
            "broadcasts rank 0's."
            if parallel
            else "Broadcast rank 0's after the model is made or loaded: "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) in PyTorch, "
            "BroadcastGlobalVariablesCallback(0) in Keras."
        )
        return (
            f"rank {other.rank} begins with other weights than rank {first.rank} ({some} of "
            f"{len(weights)} weights differ {first.key}{_at(other)}), so the ranks train "
            f"different models. {remedy} {_ON_PURPOSE}"
        )
    return (
        f"rank {other.rank} and rank {first.rank} have different weights {first.key}{_at(other)} "
        f"({some} of {len(weights)}), {_cause(optimizer, first.key)}. {_ON_PURPOSE}"
    )


def _cause(optimizer: str, when: str) -> str:
    if "hvd.join()" in when:
        return (
            "because a rank that calls hvd.join() misses the steps which the others still make. "
            "Broadcast the weights of the rank that joined last: last = hvd.join(); "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=last)"
        )
    if optimizer.startswith("DistributedDataParallel"):
        return (
            "although DistributedDataParallel averages gradients. Perhaps only rank 0 has loaded "
            "the optimizer's state, some weights were frozen when DistributedDataParallel was "
            "made (make it again after you unfreeze them), the last backward() before a step was "
            "inside no_sync(), or not all ranks make the same steps"
        )
    if optimizer.startswith("Distributed"):
        return (
            "although the optimizer is distributed. Its state may differ by rank, for example "
            "because only rank 0 has loaded it (call hvd.broadcast_optimizer_state in PyTorch), or "
            "a setting may, or gradients were changed after they were averaged"
        )
    return (
        f"because the gradients are not averaged: the {optimizer} that steps there is not the "
        "optimizer that hvd.DistributedOptimizer returned. Use "
        "optimizer = hvd.DistributedOptimizer(optimizer, ...)"
    )


def _optimizer_and_weights(note: Note) -> tuple[tuple[str, str], list[str]]:
    optimizer, *weights = note.value.splitlines() or [""]
    name, _, rates = optimizer.partition("\t")
    return (name, rates), weights
