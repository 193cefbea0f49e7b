"""The order of a dataset's rows: a pure function of (rows, seed, epoch, step, global batch).

    rows, in blocks of 128      0 0 0 0 1 1 1 1 2 2 2 2 ...
    blocks, permuted            7 7 7 7 2 2 2 2 9 9 9 9 ...    anew in each epoch
    windows of 640 steps        |---------------|---------...  rows are permuted inside a window
    global batches              |--|--|--|--|--|--|           step t takes the next one
    ranks                       |0|1|                         each takes its slice of it

So every number of ranks sees the same global batches, any step is found without replaying those
before it, and memory is a window's, whatever the size of the data. 640 steps of blocks of 128 are
five blocks for each row of a global batch: even where neighbouring rows are alike, a batch is
nearly as well mixed as one of independent rows (the variance of its mean is at most 1.2 times as
large).

A window is made of lanes, each of which gives a fixed part of every global batch: a rank computes
its own lanes alone. The last window takes whatever is left, 640 to 1279 steps. Small datasets have
no windows: they are permuted as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Last = Literal["pad", "drop"]
Rows = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_BLOCK_ROWS = 128
_WINDOW_STEPS = 640
_MAX_LANES = 64
_SMALL_ROWS = 1 << 16
_ROUNDS = 6


class Order:
    """The rows of every batch.

    Args:
        rows: in the dataset.
        global_batch: rows per step over all ranks.
        seed: of all permutations.
        shuffle: False keeps the rows as they come.
        last: what becomes of rows that fill no global batch: "pad" adds rows that were there
            before, "drop" leaves them out of the epoch.

    Attributes:
        steps: in an epoch; the same on every rank.
    """

    def __init__(
        self,
        rows: int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "pad",
    ) -> None:
        self._rows = rows
        self._batch = global_batch
        self._seed = seed
        self._shuffle = shuffle
        self._full_steps = rows // global_batch
        self.steps = self._full_steps if last == "drop" else -(-rows // global_batch)
        self._lanes = _lanes(global_batch)
        self._width = global_batch // self._lanes  # rows of each lane in a global batch
        small = rows <= _SMALL_ROWS
        self._windows = 0 if small else max(1, self._full_steps // _WINDOW_STEPS)
        self._remembered: tuple[Hashable, Rows] | None = None

    def real(self, step: int, rank: int, size: int) -> int:
        """How many rows of a rank's batch are no padding; they come first in it."""
        low, high = self._slice(rank, size)
        return min(max(0, self._rows - step * self._batch - low), high - low)

    def take(self, epoch: int, step: int, steps: int, rank: int, size: int) -> Rows:
        """The row numbers of a rank's batches from a step on.

        Args:
            epoch: from 0.
            step: of the epoch, from 0.
            steps: how many batches are wanted; fewer come where the next ones are made apart.
            rank: whose.
            size: how many ranks there are.

        Returns:
            An array of shape (batches, rows of the rank's batch), with at least one batch.

        Raises:
            IndexError: the epoch has no such step.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps} steps")
        low, high = self._slice(rank, size)
        if low == high:
            return np.empty((min(steps, self.steps - step), 0), np.int64)
        if not self._shuffle:
            starts = np.arange(step, min(step + steps, self.steps), dtype=np.int64) * self._batch
            found: Rows = (starts[:, None] + np.arange(low, high, dtype=np.int64)) % self._rows
            return found
        if step >= self._full_steps:
            return self._last(epoch)[None, low:high]
        steps = min(steps, self._full_steps - step)
        if not self._windows:
            batches = self._all(epoch)[step * self._batch : (step + steps) * self._batch]
            return batches.reshape(steps, self._batch)[:, low:high]
        window = min(step // _WINDOW_STEPS, self._windows - 1)
        if window < self._windows - 1:
            steps = min(steps, (window + 1) * _WINDOW_STEPS - step)
        places = slice(step - window * _WINDOW_STEPS, step - window * _WINDOW_STEPS + steps)
        return self._from_window(epoch, window, places, slice(low, high))

    def batch_rows(self, rank: int, size: int) -> int:
        """How many rows a rank's batch has."""
        low, high = self._slice(rank, size)
        return high - low

    def _slice(self, rank: int, size: int) -> tuple[int, int]:
        return self._batch * rank // size, self._batch * (rank + 1) // size

    def _remember(self, key: Hashable, make: Callable[[], Rows]) -> Rows:
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = None  # gives its memory back first
            self._remembered = key, make()
        return self._remembered[1]

    def _all(self, epoch: int) -> Rows:
        key = self._key(epoch, "all")
        return self._remember(key, lambda: permute(np.arange(self._rows), self._rows, key))

    def _last(self, epoch: int) -> Rows:
        """The global batch behind the full ones, with its padding."""
        if self._windows:
            places = self._left_over(epoch)
            chosen = permute(np.arange(len(places)), len(places), self._key(epoch, "last"))
            rows = self._rows_at(epoch, places[chosen])
        else:
            rows = self._all(epoch)[self._full_steps * self._batch :]
        # Where there are fewer rows than padding, they come again and again.
        return np.resize(rows, self._batch)

    def _from_window(self, epoch: int, window: int, steps: slice, part: slice) -> Rows:
        """Some steps of a window, and of each its part of the global batch."""
        width = self._width
        first, end = part.start // width, -(-part.stop // width)
        lanes = self._remember(
            (epoch, window, first, end), lambda: self._window(epoch, window, first, end)
        ).reshape(end - first, -1)
        rows = lanes[:, steps.start * width : steps.stop * width]
        count = steps.stop - steps.start
        batches = rows.reshape(end - first, count, width).transpose(1, 0, 2).reshape(count, -1)
        return batches[:, part.start - first * width : part.stop - first * width]

    def _lane_rows(self, window: int) -> int:
        """How long the lanes of a window are."""
        if window < self._windows - 1:
            return _WINDOW_STEPS * self._width
        return (self._rows - window * _WINDOW_STEPS * self._batch) // self._lanes

    def _window(self, epoch: int, window: int, first: int, end: int) -> Rows:
        """The rows of lanes ``first`` to ``end``, one lane after the other, each permuted."""
        length = self._lane_rows(window)
        start = window * _WINDOW_STEPS * self._batch + first * length
        rows = self._rows_between(epoch, start, start + (end - first) * length)
        # One permutation serves all lanes: their blocks have nothing to do with each other.
        chosen = permute(np.arange(length), length, self._key(epoch, window))
        return np.take(rows.reshape(end - first, length), chosen, axis=1)

    def _left_over(self, epoch: int) -> Rows:
        """The places of the rows that the last window's full batches leave, some of each lane."""
        window = self._windows - 1
        start, length = window * _WINDOW_STEPS * self._batch, self._lane_rows(window)
        used = (self._full_steps - window * _WINDOW_STEPS) * self._width
        chosen = permute(np.arange(used, length), length, self._key(epoch, window))
        lanes = start + np.arange(self._lanes)[:, None] * length
        behind = np.arange(start + self._lanes * length, self._rows)
        return np.concatenate([(lanes + chosen).ravel(), behind])

    def _rows_between(self, epoch: int, start: int, end: int) -> Rows:
        """The rows at consecutive places."""
        first, last = start // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)
        starts = self._rows_at(epoch, np.arange(first, last) * _BLOCK_ROWS)
        rows: Rows = (starts[:, None] + np.arange(_BLOCK_ROWS)).ravel()
        return rows[start - first * _BLOCK_ROWS : end - first * _BLOCK_ROWS]

    def _rows_at(self, epoch: int, places: Rows) -> Rows:
        """The rows at some places of the permuted blocks; what fills no block keeps its place."""
        blocks = self._rows // _BLOCK_ROWS
        block, within = np.divmod(places, _BLOCK_ROWS)
        inside = block < blocks
        block[inside] = permute(block[inside], blocks, self._key(epoch, "blocks"))
        rows: Rows = block * _BLOCK_ROWS + within
        return rows

    def _key(self, epoch: int, what: object) -> bytes:
        return repr((self._seed, self._rows, self._batch, epoch, what)).encode()


class OwnOrder:
    """The rows of every batch where each rank has rows of its own.

    Args:
        counts: how many rows each rank has.
        batch: rows per step and rank.
        rank: this rank's number.
        seed: as for :class:`Order`.
        shuffle: as for :class:`Order`.
        last: "pad" makes the epoch as long as the rank with the most rows needs, the others take
            rows again; "drop" makes it as long as all have rows for.

    Attributes:
        steps: in an epoch; the same on every rank.
    """

    def __init__(
        self,
        counts: Sequence[int],
        batch: int,
        rank: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "pad",
    ) -> None:
        self._batch = batch
        self._own = Order(counts[rank], batch, seed=seed + rank, shuffle=shuffle, last=last)
        self.steps = -(-max(counts) // batch) if last == "pad" else min(counts) // batch

    def real(self, step: int, rank: int, size: int) -> int:
        """How many rows of this rank's batch are no padding; they come first in it."""
        return self._own.real(step, 0, 1)

    def batch_rows(self, rank: int, size: int) -> int:
        """How many rows a rank's batch has."""
        return self._batch

    def take(self, epoch: int, step: int, steps: int, rank: int, size: int) -> Rows:
        """See :meth:`Order.take`; of this rank, whatever is asked for."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps} steps")
        if not self._own.steps:
            return np.zeros((1, self._batch), np.int64)  # it has another rank's row alone
        steps = min(steps, self.steps - step)
        return self._own.take(epoch, step % self._own.steps, steps, 0, 1)


def permute(numbers: Rows, count: int, key: bytes) -> Rows:
    """Where a permutation of 0 to ``count`` - 1, chosen by ``key``, takes these numbers.

    Each number is mapped by itself, in integers alone: the same on every host and release of NumPy,
    whose generators promise no such thing (NEP 19). A Feistel network permutes a power of two;
    whatever leaves the range goes through it again (cycle walking), twice on average at most.
    """
    bits = max(2, (count - 1).bit_length())
    digest = hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    found = _network(numbers.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(found >= count)
    while len(outside):
        again = _network(found[outside], bits, keys)
        found[outside] = again
        outside = outside[again >= count]
    return found.astype(np.int64)


def _network(numbers: _Words, bits: int, keys: _Words) -> _Words:
    low_bits = bits // 2
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    low, high = numbers & low_mask, numbers >> np.uint64(low_bits)
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _mix(high, key) & low_mask
        else:
            high ^= _mix(low, key) & high_mask
    found: _Words = high << np.uint64(low_bits) | low
    return found


def _mix(half: _Words, key: np.uint64) -> _Words:
    """The finaliser of MurmurHash3, shortened."""
    mixed = (half + key) * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed >>= np.uint64(29)
    return mixed


def _lanes(global_batch: int) -> int:
    """The largest number of equal parts, up to a limit, into which a global batch can be cut."""
    return max(n for n in range(1, _MAX_LANES + 1) if global_batch % n == 0)
