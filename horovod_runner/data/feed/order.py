"""Row order: which rows are in each batch, a pure function of (rows, seed, epoch, step, batch).

    rows, in blocks of 128      0 0 0 0 1 1 1 1 2 2 2 2 ...
    blocks, permuted            7 7 7 7 2 2 2 2 9 9 9 9 ...    differently in each epoch
    windows of 640 steps        |---------------|---------...  rows are permuted inside a window
    global batches              |--|--|--|--|--|--|           step t takes the next one
    ranks                       |0|1|                         each rank takes its part of it

So any number of ranks sees the same global batches, any step is found without replaying the steps
before it, and memory is bounded by a window, whatever the size of the data. 640 steps of blocks of
128 are five blocks for each row of a global batch. Even if neighbouring rows are alike, a batch is
nearly as well mixed as one of independent rows: the variance of its mean is at most 1.2 times as
large.

A window is made of lanes. A lane gives a fixed part of every global batch of its window, and a rank
computes only its own lanes. The last window takes all remaining steps, 640 to 1279. Small datasets
have no windows: they are permuted as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

LastBatch = Literal["pad", "drop", "short"]
RowNumbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_BLOCK_ROWS = 128
_WINDOW_STEPS = 640
_MAX_LANES = 64
_SMALL_ROWS = 1 << 16
_ROUNDS = 6


class Order:
    """The rows of every batch of a dataset that all ranks share.

    Args:
        rows: rows of the dataset.
        global_batch: rows per step, over all ranks.
        seed: seed of all permutations.
        shuffle: False keeps the rows in their order.
        last_batch: "pad" fills the last global batch with rows that were in the epoch before;
            "drop" leaves out the rows that do not fill it; "short" gives it the rows that are left.

    Attributes:
        steps: steps per epoch; the same on every rank.
    """

    def __init__(
        self,
        rows: int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: LastBatch = "pad",
    ) -> None:
        self._rows = rows
        self._batch = global_batch
        self._seed = seed
        self._shuffle = shuffle
        self._is_short = last_batch == "short"
        self._full_steps = rows // global_batch
        self.steps = self._full_steps if last_batch == "drop" else -(-rows // global_batch)
        self._lanes = _lanes(global_batch)
        self._width = global_batch // self._lanes  # rows of each lane in a global batch
        small = rows <= _SMALL_ROWS
        self._windows = 0 if small else max(1, self._full_steps // _WINDOW_STEPS)
        self._remembered: tuple[Hashable, RowNumbers] | None = None

    def global_rows(self, step: int) -> int:
        """Rows of the global batch of a step, with the padding of "pad"."""
        left = self._rows - step * self._batch
        return min(self._batch, left) if self._is_short else self._batch

    def part_rows(self, step: int, rank: int, size: int) -> int:
        """Rows of a rank's part of the global batch of a step; parts differ by one row at most."""
        low, high = self._part(step, rank, size)
        return high - low

    def real(self, step: int, rank: int, size: int) -> int:
        """Rows of a rank's batch that are not padding; they come first in the batch."""
        low, high = self._part(step, rank, size)
        return min(max(0, self._rows - step * self._batch - low), high - low)

    def batch_rows(self, step: int, rank: int, size: int, *, equal: bool = False) -> int:
        """Rows of a rank's batch in a step; see :meth:`take`."""
        return -(-self._batch // size) if equal else max(1, self.part_rows(step, rank, size))

    def take(
        self, epoch: int, step: int, steps: int, rank: int, size: int, *, equal: bool = False
    ) -> RowNumbers:
        """The row numbers of a rank's next batches.

        Args:
            epoch: number of the epoch, from 0 on.
            step: first step, of those that the epoch has.
            steps: how many batches are wanted. Fewer are returned at the end of a window or of
                the epoch.
            rank: number of the rank.
            size: number of ranks.
            equal: fill the batches of all ranks and steps up to the same number of rows, by
                repeating rows of the global batch. False fills only an empty part, with one row,
                because a rank without a batch could not take part in the step.

        Returns:
            An array of shape (batches, rows of the rank's batch), with at least one batch. The
            rows of the rank's part come first.
        """
        is_last = step >= self._full_steps
        steps = 1 if is_last else min(steps, self._full_steps - step)
        whole = self.global_rows(step)
        low, high = self._part(step, rank, size)
        if low == high:
            low, high = low % whole, low % whole + 1
        missing = self.batch_rows(step, rank, size, equal=equal) - (high - low)
        if missing and is_last:  # may lack many: repeating few would leave a batch no variance
            batches = self._batches(epoch, step, 1, 0, whole)
            return np.take(batches, np.arange(low, high + missing), axis=1, mode="wrap")
        batches = self._batches(epoch, step, steps, low, high)
        if not missing:
            return batches
        return np.take(batches, np.arange(high - low + missing), axis=1, mode="wrap")

    def _batches(self, epoch: int, step: int, steps: int, low: int, high: int) -> RowNumbers:
        """Rows ``low`` to ``high`` of some global batches: full ones, or the last one."""
        if not self._shuffle:
            starts = np.arange(step, step + steps, dtype=np.int64) * self._batch
            rows: RowNumbers = (starts[:, None] + np.arange(low, high, dtype=np.int64)) % self._rows
            return rows
        if step >= self._full_steps:
            return self._last(epoch)[None, low:high]
        if not self._windows:
            batches = self._all(epoch)[step * self._batch : (step + steps) * self._batch]
            return batches.reshape(steps, self._batch)[:, low:high]
        window = min(step // _WINDOW_STEPS, self._windows - 1)
        if window < self._windows - 1:
            steps = min(steps, (window + 1) * _WINDOW_STEPS - step)
        places = slice(step - window * _WINDOW_STEPS, step - window * _WINDOW_STEPS + steps)
        return self._from_window(epoch, window, places, slice(low, high))

    def _part(self, step: int, rank: int, size: int) -> tuple[int, int]:
        """Where a rank's part of a global batch begins and ends; rounded up, so rank 0 has most."""
        rows = self.global_rows(step)
        return -(-rows * rank // size), -(-rows * (rank + 1) // size)

    def _remember(self, key: Hashable, make: Callable[[], RowNumbers]) -> RowNumbers:
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = None  # frees its memory first
            self._remembered = key, make()
        return self._remembered[1]

    def _all(self, epoch: int) -> RowNumbers:
        key = self._key(epoch, "all")
        return self._remember(key, lambda: permute(np.arange(self._rows), self._rows, key))

    def _last(self, epoch: int) -> RowNumbers:
        """The global batch after the full ones, with its padding."""
        if self._windows:
            places = self._left_over(epoch)
            chosen = permute(np.arange(len(places)), len(places), self._key(epoch, "last"))
            rows = self._rows_at(epoch, places[chosen])
        else:
            rows = self._all(epoch)[self._full_steps * self._batch :]
        # If there are fewer rows than padding, they are repeated several times.
        return rows if self._is_short else np.resize(rows, self._batch)

    def _from_window(self, epoch: int, window: int, steps: slice, part: slice) -> RowNumbers:
        """Some steps of a window, and of each step a part of the global batch."""
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
        """Rows of each lane of a window."""
        if window < self._windows - 1:
            return _WINDOW_STEPS * self._width
        return (self._rows - window * _WINDOW_STEPS * self._batch) // self._lanes

    def _window(self, epoch: int, window: int, first: int, end: int) -> RowNumbers:
        """The rows of lanes ``first`` to ``end``, one lane after the other, each permuted."""
        length = self._lane_rows(window)
        start = window * _WINDOW_STEPS * self._batch + first * length
        rows = self._rows_between(epoch, start, start + (end - first) * length)
        # One permutation serves all lanes, because their blocks are unrelated.
        chosen = permute(np.arange(length), length, self._key(epoch, window))
        return np.take(rows.reshape(end - first, length), chosen, axis=1)

    def _left_over(self, epoch: int) -> RowNumbers:
        """The places of the rows that the last window's full batches leave, some of each lane."""
        window = self._windows - 1
        start, length = window * _WINDOW_STEPS * self._batch, self._lane_rows(window)
        used = (self._full_steps - window * _WINDOW_STEPS) * self._width
        chosen = permute(np.arange(used, length), length, self._key(epoch, window))
        lanes = start + np.arange(self._lanes)[:, None] * length
        behind = np.arange(start + self._lanes * length, self._rows)
        return np.concatenate([(lanes + chosen).ravel(), behind])

    def _rows_between(self, epoch: int, start: int, end: int) -> RowNumbers:
        """The rows at consecutive places."""
        first, last = start // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)
        starts = self._rows_at(epoch, np.arange(first, last) * _BLOCK_ROWS)
        rows: RowNumbers = (starts[:, None] + np.arange(_BLOCK_ROWS)).ravel()
        return rows[start - first * _BLOCK_ROWS : end - first * _BLOCK_ROWS]

    def _rows_at(self, epoch: int, places: RowNumbers) -> RowNumbers:
        """The rows at some places of the permuted blocks; an incomplete block keeps its place."""
        blocks = self._rows // _BLOCK_ROWS
        block, within = np.divmod(places, _BLOCK_ROWS)
        inside = block < blocks
        block[inside] = permute(block[inside], blocks, self._key(epoch, "blocks"))
        rows: RowNumbers = block * _BLOCK_ROWS + within
        return rows

    def _key(self, epoch: int, what: object) -> bytes:
        return repr((self._seed, self._rows, self._batch, epoch, what)).encode()


class PerRankOrder:
    """The rows of every batch of a dataset that is split among the ranks; see :class:`Order`.

    "pad" makes the epoch long enough for the rank with the most rows, and the others repeat rows.
    "drop" ends it when the rank with the fewest rows has no full batch.
    """

    def __init__(
        self,
        counts: Sequence[int],
        batch: int,
        rank: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: LastBatch = "pad",
    ) -> None:
        self._batch = batch
        self._size = len(counts)
        self._order = Order(
            counts[rank], batch, seed=seed + rank, shuffle=shuffle, last_batch=last_batch
        )
        self.steps = -(-max(counts) // batch) if last_batch == "pad" else min(counts) // batch

    def real(self, step: int, rank: int, size: int) -> int:
        """Rows of this rank's batch that are not padding; they come first in the batch."""
        return self._order.real(step, 0, 1)

    def global_rows(self, step: int) -> int:
        """See :meth:`Order.global_rows`."""
        return self._batch * self._size

    def part_rows(self, step: int, rank: int, size: int) -> int:
        """See :meth:`Order.part_rows`."""
        return self._batch

    def batch_rows(self, step: int, rank: int, size: int, *, equal: bool = False) -> int:
        """See :meth:`Order.batch_rows`."""
        return self._batch

    def take(
        self, epoch: int, step: int, steps: int, rank: int, size: int, *, equal: bool = False
    ) -> RowNumbers:
        """See :meth:`Order.take`; always for this rank."""
        if not self._order.steps:
            return np.zeros((1, self._batch), np.int64)  # it has one row, another rank's
        steps = min(steps, self.steps - step)
        return self._order.take(epoch, step % self._order.steps, steps, 0, 1)


def permute(numbers: RowNumbers, count: int, key: bytes) -> RowNumbers:
    """Apply the permutation of 0 to ``count`` - 1 that ``key`` chooses.

    Each number is mapped by itself, with integer arithmetic: the result is the same on every host
    and with every release of NumPy, whose generators do not promise that (NEP 19). A Feistel
    network permutes a power of two. Numbers outside the range go through it again (cycle walking),
    on average at most twice.
    """
    bits = max(2, (count - 1).bit_length())
    digest = hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    permuted = _network(numbers.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(permuted >= count)
    while len(outside):
        again = _network(permuted[outside], bits, keys)
        permuted[outside] = again
        outside = outside[again >= count]
    return permuted.astype(np.int64)


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
    words: _Words = high << np.uint64(low_bits) | low
    return words


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


def rows_of_rank(
    sizes: Sequence[int], rank: int, ranks: int, last_batch: LastBatch, *, shared: bool
) -> RowNumbers:
    """Number the rows that a rank keeps for all epochs. All ranks keep equally many.

    If the rows are not ``shared``, ``sizes`` has one number for each rank. "drop" leaves out the
    rows that are too many, and the others repeat some.
    """
    if shared:
        (rows,) = sizes
        count = rows // ranks if last_batch == "drop" else -(-rows // ranks)
        return (np.arange(count) * ranks + rank) % rows
    count = min(sizes) if last_batch == "drop" else max(sizes)
    return np.arange(count) % max(1, sizes[rank])
