"""Base of collective Keras callbacks: checks that all ranks train the same number of batches."""

from __future__ import annotations

from typing import Any

import keras

from horovod_runner.integrations.keras.collectives import collectives
from horovod_runner.integrations.keras.reporting import check_epoch


class CollectiveCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of callbacks that reduce. It compares the ranks' batches, before and after an epoch.

    Horovod would otherwise pair the last gradients of one rank with the next epoch's gradients of a
    rank that had fewer batches, or wait for ever.
    """

    # Keras may train the next batch before a callback has seen this one.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._batches = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # With a GPU, TensorFlow compiles with XLA, which has no kernels for Horovod's operations.
        compiled = keras.backend.backend() == "tensorflow" and getattr(model, "jit_compile", False)
        if compiled and collectives().hvd.size() > 1:
            model.jit_compile = False
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        backend = collectives()
        if backend.hvd.size() == 1:
            return
        steps = self.params.get("steps")
        rows = backend.gather([-1 if steps is None else int(steps)], "horovod_runner.steps")
        counts = [count for (count,) in rows]
        if len(set(counts)) > 1 and -1 not in counts:
            raise ValueError(
                f"the ranks have different numbers of batches per epoch: {by_rank(counts)}. All "
                "ranks must have the same number, because each batch is reduced with one of every "
                f"other rank. Set steps_per_epoch={min(counts)}, or use a Shard's batches, whose "
                "number is the same on all ranks"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The optimizer's count cannot be used: TensorFlow also counts the missing last batch.
        self._batches = max(self._batches, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._meet(ended=False)
        check_epoch(self.model, epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        self._meet(ended=True)

    def _meet(self, *, ended: bool) -> None:
        """Wait for all ranks, even if they have batches left, and compare epochs and batches."""
        backend = collectives()
        if backend.hvd.size() == 1:
            return
        if backend.can_join():
            try:
                backend.join()
            except Exception as error:
                # A RuntimeError like Horovod's: if another rank failed, that rank's error counts.
                raise RuntimeError(
                    f"Horovod has been shut down while this rank waited for the others, after "
                    f"{self._batches} batches in epoch {self._epoch + 1}. Either another rank "
                    "failed, or it had more batches than this one: with sparse gradients Horovod "
                    "cannot reduce those. Give all ranks the same number of batches "
                    "(steps_per_epoch, or a Shard's batches), or set sparse_as_dense=True, which "
                    "reports the numbers"
                ) from error
        here = [self._epoch, self._batches, int(ended)]
        rows = backend.gather(here, "horovod_runner.epoch")
        if rows.count(here) == len(rows):
            return
        if len({epoch for epoch, _, _ in rows}) > 1 or len({end for *_, end in rows}) > 1:
            epochs = by_rank([epoch + 1 for epoch, _, _ in rows])
            raise ValueError(
                f"the ranks began different numbers of epochs: {epochs}. If a callback ends the "
                "training (EarlyStopping), give it to every rank, with MetricAverageCallback "
                "in the list: then all ranks decide by the same metrics"
            )
        counts = [batches for _, batches, _ in rows]
        raise ValueError(
            f"the ranks had different numbers of batches in epoch {self._epoch + 1}: "
            f"{by_rank(counts)}. The last updates of the weights are wrong. Give all ranks the "
            f"same number: set steps_per_epoch={min(counts)}, or use a Shard's batches"
        )


def by_rank(counts: list[int]) -> str:
    """Format a count per rank for people; only the first 8 ranks."""
    texts = [f"{count} on rank {rank}" for rank, count in enumerate(counts)]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
