"""What Horovod's estimators share: checks, ids of runs, and their Params in the words of `ml`."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Estimator

from horovod_runner.checkpoints.checkpoint import Checkpoint, find_complete
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.integrations.horovod_spark import util
from horovod_runner.integrations.horovod_spark.backend import SparkBackend
from horovod_runner.integrations.horovod_spark.model import HorovodModel
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.horovod_spark.store import Store
from horovod_runner.integrations.horovod_spark.training import Training
from horovod_runner.integrations.spark_ml.params import set_named
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.spark_ml.rows import TrainingRows, split
from horovod_runner.launchers.sessions import find_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.integrations.spark_ml.estimator import HorovodEstimator as OurEstimator
    from horovod_runner.integrations.spark_ml.model import TrainedModel

__all__ = ["HorovodEstimator", "HorovodModel"]


class HorovodEstimator(Estimator, EstimatorParams, Saveable):  # type: ignore[misc]
    """Trains a model on a DataFrame; base of Horovod's estimators.

    Subclasses of the user's may override ``_get_or_create_backend``, ``get_model_class`` and
    ``_get_model_kwargs``.
    """

    _unsaved = ("backend", "store")
    #: The beginning of the ids of runs, as Horovod's.
    prefix: ClassVar[str]
    #: The module of Horovod that the training function uses.
    library: ClassVar[str]

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._setDefault(**self._defaults())
        set_named(self, params)

    def _defaults(self) -> dict[str, Any]:
        """The defaults of the Params that only this framework's estimator has."""
        return {}

    def _environment(self) -> dict[str, str]:
        """Environment variables for the ranks."""
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
        training = Training(
            self,
            self._get_or_create_backend(),
            run_id,
            epochs_before=self._epochs_before(run_id),
            number=number,
            written=written,
        )
        fitted = self._estimator(training).fit_rows(rows)
        return self._create_model(fitted, run_id, util.metadata_of(rows.train), training)

    def _check_params(self) -> None:
        for name in ("model", "feature_cols", "label_cols"):
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

    def _checkpoint_dir(self, run_id: str) -> str | None:
        store: Store | None = self.getStore()
        return None if store is None else store.get_checkpoint_path(run_id)

    def _has_checkpoint(self, run_id: str) -> bool:
        folder = self._checkpoint_dir(run_id)
        return folder is not None and bool(find_complete(open_folder(folder)))

    def _load_checkpoint(self, run_id: str) -> Checkpoint:
        """The last checkpoint of an earlier training with this id."""
        folder = open_folder(self._checkpoint_dir(run_id) or "")
        return Checkpoint(folder, find_complete(folder)[0])

    def _epochs_before(self, run_id: str) -> int:
        """The epochs that earlier trainings with this id have finished."""
        if not self._has_checkpoint(run_id):
            return 0
        done = self._epochs_of(self._load_checkpoint(run_id))
        # A training that was interrupted goes on to its end.
        return done - done % int(self.getEpochs())

    def _epochs_of(self, checkpoint: Checkpoint) -> int:
        """How many epochs were done when a checkpoint was saved."""
        return int(checkpoint.metrics.get("epoch", 0))

    @abstractmethod
    def _estimator(self, training: Training) -> OurEstimator:
        """The estimator of `ml` that trains."""

    @abstractmethod
    def _create_model(
        self,
        fitted: TrainedModel,
        run_id: str,
        metadata: Mapping[str, Any],
        training: Training,
    ) -> Any:
        """The model that ``fit`` returns, of the class ``get_model_class()``."""

    def _common(self, training: Training) -> dict[str, Any]:
        """The Params of `ml`'s estimator that have a counterpart in all of Horovod's."""
        shuffles = self.getShuffle() and self.getShuffleBufferSize() != 0
        given = {
            "model": self.getModel(),
            "optimizer": self.getOrDefault("optimizer"),
            "loss": self.getLoss(),
            "loss_weights": self.getLossWeights(),
            "feature_cols": self.getFeatureCols(),
            "label_cols": self.getLabelCols(),
            "sample_weight_col": self.getSampleWeightCol(),
            "batch_size": self.getBatchSize(),
            "val_batch_size": self.getValBatchSize(),
            "epochs": training.epochs_before + self.getEpochs(),
            "train_steps_per_epoch": self.getTrainStepsPerEpoch(),
            "validation_steps_per_epoch": self.getValidationStepsPerEpoch(),
            "shuffle": bool(shuffles),
            "random_seed": self.getRandomSeed() or 0,
            "callbacks": self.getCallbacks(),
            "gradient_compression": self.getGradientCompression(),
            "backward_passes_per_step": self.getBackwardPassesPerStep(),
            "verbose": int(self.getVerbose()),
        }
        return {name: value for name, value in given.items() if value is not None}
