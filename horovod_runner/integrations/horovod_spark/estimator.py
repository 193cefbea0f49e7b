"""What Horovod's estimators share: checks, ids of runs, and their Params as a training."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Estimator

from horovod_runner.integrations.horovod_spark import util
from horovod_runner.integrations.horovod_spark.backend import SparkBackend
from horovod_runner.integrations.horovod_spark.model import HorovodModel
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.horovod_spark.stored_run import StoredRun
from horovod_runner.integrations.spark_ml.params import set_named, training_arguments
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.training.checks import check_rows
from horovod_runner.integrations.training.rows import TrainingRows, split
from horovod_runner.launchers.sessions import find_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.integrations.training.training import Trained, Training

__all__ = ["HorovodEstimator", "HorovodModel"]


class HorovodEstimator(Estimator, EstimatorParams, Saveable):  # type: ignore[misc]
    """Trains a model on a DataFrame; base of Horovod's estimators.

    Subclasses of the user's may override ``_get_or_create_backend``, ``get_model_class`` and
    ``_get_model_kwargs``.
    """

    _unsaved = ("backend", "store")
    #: The beginning of the ids of runs, as Horovod's.
    prefix: ClassVar[str]
    #: The defaults of the Params that only this framework's estimator has.
    _own_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._setDefault(**self._own_defaults)
        set_named(self, params)

    def _needs(self) -> Sequence[str]:
        return ()

    def _environment(self) -> dict[str, str]:
        return {}

    def fit_on_parquet(self, params: Any = None, dataset_idx: Any = None) -> Any:
        """Train with the Parquet files at the store's paths, instead of a DataFrame.

        Args:
            params: Params to change for this training.
            dataset_idx: the number that ``util.prepare_data`` gave; None for the store's own paths.

        Raises:
            ValueError: there is no store.
        """
        estimator = self.copy(params) if params else self
        store = estimator.getStore()
        if store is None:
            raise ValueError("fit_on_parquet reads the files of a store: set store=Store.create()")
        read = find_session().read
        train = read.parquet(store.get_train_data_path(dataset_idx))
        valid = None
        if estimator.getValidation():
            valid = read.parquet(store.get_val_data_path(dataset_idx))
        return estimator._fit_rows(TrainingRows(train, valid), dataset_idx, written=True)

    def _fit(self, dataset: DataFrame) -> Any:
        train, valid = split(dataset, self.getValidation(), self.getRandomSeed() or 0)
        return self._fit_rows(TrainingRows(train, valid), None)

    def _fit_rows(self, rows: TrainingRows, number: Any, *, written: bool = False) -> Any:
        """Train on rows that are split already; ``written`` if the store has them."""
        self._check_params()
        # Several fits may begin in the same second.
        run_id = self.getRunId() or f"{self.prefix}_{int(time.time())}_{os.urandom(3).hex()}"
        run = StoredRun(
            self.getStore(),
            run_id,
            self._get_or_create_backend(),
            use_gpu=self.getUseGpu(),
            env=self._environment(),
            files_per_rank=self.getOrDefault("partitions_per_process"),
        )
        epochs_before = self._epochs_before(run)
        training = self._training(run.logs, **self._arguments(run, epochs_before))
        training = self._with_doubles(training, util.doubles_of(rows.train))
        check_rows(training, rows.train)
        trained, record = run.train(training.for_ranks(), rows, number=number, written=written)
        run.end(self._epochs_of)
        network = training.trained_model(trained)
        metadata = util.metadata_of(rows.train)
        model = self._create_model(network, trained, epochs_before, run_id, metadata)
        model.run = record
        return model

    def _with_doubles(self, training: Training, doubles: Mapping[str, bool]) -> Training:
        """The training with doubles where Horovod has them: in rows for ``transformation_fn``."""
        if self.getTransformationFn() is None:
            return training
        parts = training.columns.items()
        dtypes = {name: "float64" for name, column in parts if column in [*doubles]}
        return replace(training, options={**training.options, "dtypes": dtypes})

    def _arguments(self, run: StoredRun, epochs_before: int) -> dict[str, Any]:
        """The arguments of Training that mean the same in all frameworks."""
        return {
            **training_arguments(self),
            "labels": self.getLabelCols(),
            "weight": self.getSampleWeightCol(),
            "epochs": epochs_before + self.getEpochs(),
            "shuffle": bool(self.getShuffle() and self.getShuffleBufferSize() != 0),
            "random_seed": self.getRandomSeed() or 0,
            "verbose": int(self.getVerbose()),
            "saves": run.folder is not None,
            "scales_learning_rate": True,
        }

    def _check_params(self) -> None:
        for name in ("model", "feature_cols", "label_cols", *self._needs()):
            if self.getOrDefault(name) is None:
                raise ValueError(f"{type(self).__name__} requires {name}")
        if self.getOrDefault("data_module") is not None:
            raise ValueError(
                "data_module is not supported: the ranks get the DataFrame's rows from this "
                "package's feed. With a reader of your own, train in a function: "
                "HorovodRunner(np=4).run(train)"
            )
        store = self.getStore()
        if store is not None and store.saving_runs() and getattr(store, "storage_options", None):
            raise ValueError(
                "storage_options of the store do not reach the ranks, which write the checkpoints: "
                "give credentials by the environment (such as AWS_ACCESS_KEY_ID) or by roles, or "
                "set save_runs=False"
            )

    def _get_or_create_backend(self) -> Any:
        """The backend that trains: the Param's, or Spark's with ``num_proc`` ranks.

        Raises:
            ValueError: both are set.
        """
        backend = self.getBackend()
        if backend is None:
            return SparkBackend(self.getNumProc(), verbose=self.getVerbose())
        if self.getNumProc() is not None:
            raise ValueError("set backend or num_proc, not both: a backend has its own num_proc")
        return backend

    def _epochs_before(self, run: StoredRun) -> int:
        """The epochs with which an earlier training with the same id ended.

        Those of one that was interrupted do not count: it goes on to its end.
        """
        return 0 if run.last_checkpoint() is None else run.epochs_ended()

    def _epochs_of(self, checkpoint: Checkpoint) -> int:
        return int(checkpoint.metrics.get("epoch", 0))

    @abstractmethod
    def _training(self, logs: str | None, **arguments: Any) -> Training:
        """The training of this framework, which writes its logs to a folder or URL."""

    @abstractmethod
    def _create_model(
        self, network: Any, trained: Trained, epochs_before: int, run_id: str, metadata: Any
    ) -> Any:
        """The model that ``fit`` returns, of the class ``get_model_class()``.

        Earlier trainings with this id have finished ``epochs_before`` epochs of the history.
        """
