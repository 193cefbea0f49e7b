"""What the estimators of all frameworks share: the description of the training, and the run."""

from __future__ import annotations

import os
import posixpath
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from pyspark.ml import Estimator

from horovod_runner.common.options import DataConfig, grouped
from horovod_runner.common.spark_session import is_on_this_machine
from horovod_runner.integrations.spark_ml.model import TrainedModel
from horovod_runner.integrations.spark_ml.params import (
    COPIED,
    EstimatorOptions,
    TrainingParams,
    set_named,
    training_arguments,
)
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.training.checks import check_rows
from horovod_runner.integrations.training.classes import loss_name
from horovod_runner.integrations.training.rows import TrainingRows, pack_once, split
from horovod_runner.integrations.training.training import Trained, Training, train
from horovod_runner.run.runner import HorovodRunner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class HorovodEstimator(Estimator, TrainingParams, Saveable):  # type: ignore[misc]
    """Trains a model on a DataFrame, as Horovod ranks; base of the estimators.

    An argument is a Param of the same name: it has a setter and a getter, can be varied by a
    ParamGridBuilder, and ``explainParams()`` describes it.
    """

    #: The class of the model that ``fit`` returns.
    _model_class: ClassVar[type[TrainedModel]]

    def __init__(self, **params: Unpack[EstimatorOptions]) -> None:
        super().__init__()
        set_named(self, params)

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[Any],  # noqa: N803
    ) -> Iterator[tuple[int, TrainedModel]]:
        """Fit a model for each map of Params.

        The rows are packed once for all of them, where driver and ranks share a folder.

        Returns:
            An iterator of (index, model), which several threads may use at once.
        """
        from pyspark.ml.base import _FitMultipleIterator

        estimators = [self.copy(params) for params in paramMaps]
        shared = _shared_rows(dataset, estimators)

        def fit(index: int) -> TrainedModel:
            trained: TrainedModel = estimators[index].fit_rows(
                shared or estimators[index].rows(dataset)
            )
            return trained

        models: Iterator[tuple[int, TrainedModel]] = _FitMultipleIterator(fit, len(estimators))
        return models

    def _fit(self, dataset: DataFrame) -> TrainedModel:
        return self.fit_rows(self.rows(dataset))

    def fit_rows(self, rows: TrainingRows) -> TrainedModel:
        """Train on rows that are split already."""
        training = self.training()
        check_rows(training, rows.train)
        sent = training.for_ranks()
        runner = HorovodRunner(**self.runner_arguments())
        trained: Trained = runner.run(train, training=sent, **rows.datasets(training.read_columns))
        model = self._model_class()
        model._set(model=training.trained_model(trained), loss_name=self._loss_name())
        model.history, model.run = trained.history, runner.last_run
        for name in COPIED:
            if self.isSet(name):
                model._set(**{name: self.getOrDefault(name)})
        return model

    def training(self) -> Training:
        """The training that the Params describe.

        Raises:
            ValueError: a Param is not set without which there is nothing to train, or is below 1.
        """
        for name in self._needs():
            if self.value_of(name) is None:
                raise ValueError(
                    f"{type(self).__name__} requires {name}: {type(self).__name__}({name}=...) or "
                    f"set{name.capitalize()}(...)"
                )
        is_saved = self.value_of("checkpoint_dir") is not None
        return self._training(
            features=self.features,
            labels=self.labels,
            weight=self.weight,
            options=self.feed_options,
            saves=is_saved or self.getOrDefault("max_restarts") > 0,
            **training_arguments(self),
        )

    def _needs(self) -> Sequence[str]:
        return ("model", "optimizer", "loss")

    @abstractmethod
    def _training(self, **arguments: Any) -> Training:
        """The training of this framework; the arguments are those of Training."""

    def _loss_name(self) -> str:
        return loss_name(self.getOrDefault("loss"))

    def runner_arguments(self) -> dict[str, Any]:
        """The arguments of HorovodRunner."""
        options = {
            "np": self.getOrDefault("np"),
            "max_restarts": self.getOrDefault("max_restarts"),
            "resume": self.getOrDefault("resume"),
            "sinks": self.value_of("sinks") or (),
            "progress": self.getOrDefault("verbose") > 0,
            "checkpoint_dir": self._checkpoint_dir(),
            "weight_check": self.value_of("weight_check"),
            **(self.value_of("runner_options") or {}),
        }
        if not self.getOrDefault("use_gpu"):
            options["gpus_per_rank"] = 0
        return grouped(options)

    def _checkpoint_dir(self) -> str | None:
        folder: str | None = self.value_of("checkpoint_dir")
        run_id: str | None = self.value_of("run_id")
        if folder is None or run_id is None:
            return folder
        joined = posixpath.join(folder, run_id)
        if "://" not in folder:
            os.makedirs(joined, exist_ok=True)
        return joined

    def rows(self, dataset: DataFrame) -> TrainingRows:
        """The rows to train with, and those to validate with.

        Raises:
            ValueError: ``validation`` is neither a fraction nor a column.
        """
        seed = self.getOrDefault("random_seed")
        return TrainingRows(*split(dataset, self.value_of("validation"), seed))


def _shared_rows(dataset: DataFrame, estimators: Sequence[HorovodEstimator]) -> TrainingRows | None:
    """The rows of several fits, packed once; None if they differ, or no folder is shared."""
    if not estimators:
        return None
    first = estimators[0]
    splits = {
        (each.value_of("validation"), each.getOrDefault("random_seed")) for each in estimators
    }
    config: DataConfig = first.runner_arguments().get("data_config", DataConfig())
    is_local = all(each.getOrDefault("np") < 0 for each in estimators)
    if len(splits) > 1 or (
        config.shared_dir is None and not is_local and not is_on_this_machine(dataset.sparkSession)
    ):
        return None
    columns = {name for each in estimators for name in each.training().read_columns}
    folder = None if config.shared_dir is None else Path(config.shared_dir)
    return pack_once(first.rows(dataset), columns, folder, config.disk_limit)
