"""One training of Horovod's estimators: its folders in a store, and the ranks that run it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import cloudpickle

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.checkpoints.checkpoint import Checkpoint, find_complete
from horovod_runner.common.options import Options
from horovod_runner.common.text import without_password
from horovod_runner.data.sources import parquet
from horovod_runner.host.folders.folder import local_path
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.problems import describe
from horovod_runner.integrations.horovod_spark import util
from horovod_runner.integrations.horovod_spark.backend import SparkBackend
from horovod_runner.integrations.horovod_spark.outside import OutsideFunction
from horovod_runner.integrations.training.rows import TrainingRows
from horovod_runner.integrations.training.training import Trained, Training, train

if TYPE_CHECKING:
    from horovod_runner.integrations.horovod_spark.store import Store
    from horovod_runner.results.run import Run

_ENDED: Final = "epochs-ended"  # a file in the folder of the checkpoints


@dataclass(frozen=True)
class StoredRun:
    """A training, by its id, and what the store has of it."""

    store: Store | None
    run_id: str
    backend: Any
    use_gpu: bool
    env: Mapping[str, str]
    files_per_rank: int  # of rows, for ranks of a user's backend

    @property
    def folder(self) -> str | None:
        """The folder or URL of the checkpoints; None if they are not kept."""
        return None if self.store is None else self.store.get_checkpoint_path(self.run_id)

    @property
    def logs(self) -> str | None:
        """The folder or URL of the logs in the store; None if they are not kept."""
        return None if self.store is None else self.store.get_logs_path(self.run_id)

    def last_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint of earlier trainings with this id; None without one."""
        if self.folder is None:
            return None
        folder = open_folder(self.folder)
        complete = find_complete(folder)
        return Checkpoint(folder, complete[0]) if complete else None

    def epochs_ended(self) -> int:
        """With how many epochs the last training with this id ended; 0 if none has ended."""
        if self.folder is None:
            return 0
        try:
            return int(open_folder(self.folder).read(_ENDED))
        except FileNotFoundError:
            return 0

    def end(self, epochs_of: Callable[[Checkpoint], int]) -> None:
        """Keep with how many epochs this training ended, for further ones with this id."""
        try:
            last = self.last_checkpoint()
            if last is not None:
                folder = open_folder(last.folder)
                folder.remove(_ENDED)  # some stores replace no file
                folder.write(_ENDED, str(epochs_of(last)).encode())
        except Exception as error:  # every kind of folder raises others
            warnings.warn(
                f"the file {_ENDED} could not be written to {without_password(str(self.folder))}: "
                f"{describe(error)} A further training with run_id={self.run_id!r} takes this "
                "one for interrupted, and trains fewer epochs: use another run_id",
                stacklevel=2,
            )

    def train(
        self, training: Training, rows: TrainingRows, *, number: Any, written: bool
    ) -> tuple[Trained, Run | None]:
        """Train on all ranks, with a training that ``Training.for_ranks`` returned.

        ``written`` says whether the store has the rows already: under ``number``, or, where
        ``number`` is None, at its own paths.

        Returns:
            Rank 0's value, and the record of the run: None with a backend of the user's own.
        """
        local = None if self.folder is None else local_path(self.folder)
        if local is not None:
            os.makedirs(local, exist_ok=True)
        columns = sorted(training.read_columns)
        backend = self.backend
        if not isinstance(backend, SparkBackend) or type(backend).run is not SparkBackend.run:
            return self._train_outside(
                training, rows.dataframes(columns), number=number, written=written
            ), None
        options = {} if self.use_gpu else {"gpus_per_rank": 0}
        runner = backend.runner(
            self.env,
            checkpoint_dir=self.folder,
            resume=self.folder is not None,
            sinks=(*backend._kwargs.get("sinks", ()), *self._log_sinks()),
            **options,
        )
        with backend.output():
            return runner.run(train, training=training, **rows.datasets(columns)), runner.last_run

    def _log_sinks(self) -> list[Any]:
        """Writes TensorBoard's logs where the store has them, if that can be done."""
        if self.logs is None or local_path(self.logs) is None:
            return []
        from horovod_runner.sinks.tensorboard import TensorBoardSink

        try:
            return [TensorBoardSink(self.logs)]
        except ImportError:
            return []

    def _train_outside(
        self, training: Training, dataframes: Mapping[str, Any], *, number: Any, written: bool
    ) -> Trained:
        """Train with a backend of the user's own, whose ranks read the rows from the store."""
        store: Any = self.store
        if store is None:
            raise ValueError(
                f"{type(self.backend).__name__} starts its ranks itself, and they read the rows "
                "from a store: set store=Store.create(folder that all hosts see)"
            )
        parts = self.backend.num_processes() * self.files_per_rank
        paths = {"train": store.get_train_data_path, "valid": store.get_val_data_path}
        number = number if written else os.urandom(4).hex()
        run_options = Options(np=-1, checkpoint_dir=self.folder, resume=self.folder is not None)
        readers = {}
        with ExitStack() as stack:
            for name, dataframe in dataframes.items():
                path = paths[name](number)
                if not written:
                    stack.callback(_remove, store, path)
                    util.write_parquet(dataframe, path, parts)
                options = getattr(store, "storage_options", None)
                readers[name] = parquet(path, storage_options=options or None).prepare(name, None)
            archive = stack.enter_context(Archive(os.urandom(4).hex(), run_options))
            checkpoints = None if self.folder is None else archive.plan(1)
            pickled = cloudpickle.dumps(training, protocol=5)
            whole = OutsideFunction(pickled, readers, training.library, checkpoints, self.use_gpu)
            values = self.backend.run(whole, args=(), kwargs={}, env=dict(self.env))
        trained: Trained = values[0]
        return trained


def _remove(store: Any, path: str) -> None:
    """Remove a folder of rows from a store; what cannot be removed stays."""
    with suppress(Exception):  # every filesystem raises others
        store.fs.rm(store.get_localized_path(path), recursive=True)
