"""Counts the epochs of a dataset's feeds, so that a feed made anew goes on with the next one."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from horovod_runner.data.place import place
from horovod_runner.worker import context
from horovod_runner.worker.api import log_to_driver
from horovod_runner.worker.checks import notes

_LONG = 500  # characters
_MOST = 10_000  # of what is remembered of feeds


class FeedKey(NamedTuple):
    """Feeds with the same key share a count of epochs."""

    options: str
    seed: int | None  # of the shuffling; None without shuffling
    place: tuple[int, int]  # the rank's number, and the number of ranks


class Made(NamedTuple):
    """A feed that was made."""

    key: FeedKey
    number: int  # among the feeds of the dataset on this rank, from 1 on
    epoch: int  # that it begins with


class Epochs:
    """The epochs of all feeds of a dataset.

    A feed gets its first epoch when it is made, not when it is read: two feeds that are made
    together, to be read side by side, have the same order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made = 0
        self._next: dict[FeedKey, int] = {}
        self._loaded: set[tuple[FeedKey, int, int]] = set()
        self._warned = False

    def make(self, key: FeedKey) -> Made:
        """Count a new feed."""
        self._made += 1
        return Made(key, self._made, self._next.get(key, 0))

    def begin(self, key: FeedKey, epoch: int) -> None:
        """Record that a feed begins an epoch."""
        # As the latest one: main may make a feed with another seed in each epoch.
        self._next[key] = max(self._next.pop(key, 0), epoch + 1)
        if len(self._next) > _MOST:
            del self._next[next(iter(self._next))]

    def open(self, feed: Made, epoch: int, step: int, *, resumed: bool) -> None:
        """Record a feed's first iteration, or the first one after a state was loaded.

        ``resumed`` says whether the user chose where it begins.
        """
        key = feed.key
        seed = "" if key.seed is None else f", seed={key.seed}"
        value = f"{_shortened(key.options)}{seed}, from epoch {epoch}, step {step} on"
        notes.send("feed", f"{self._name}\n{feed.number}", value)
        rank = context.current()
        if resumed:
            if (key, epoch, step) in self._loaded:
                self._warn(
                    f"a feed of {self._name} begins with epoch {epoch}, step {step} for the "
                    "second time, because the same state was loaded twice: the same rows come "
                    "again, in the same order. Load a state once, before the loop over epochs."
                )
            if len(self._loaded) < _MOST:
                self._loaded.add((key, epoch, step))
        elif key.seed is not None and not epoch and rank is not None and rank.resumed:
            self._warn(
                f"the training resumes from a checkpoint, and a shuffled feed of {self._name} "
                "begins with the order of epoch 0 again. Save feed.state_dict() in the "
                "checkpoint, and pass it to feed.load_state_dict()."
            )

    def _warn(self, text: str) -> None:
        if not self._warned and place()[0] == 0:
            log_to_driver(f"HorovodRunner: {text}")
        self._warned = True


def _shortened(text: str) -> str:
    if len(text) <= _LONG:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_LONG]}... ({digest})"
