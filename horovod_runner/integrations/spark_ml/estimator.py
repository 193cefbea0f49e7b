"""What the estimators of all frameworks share: checks, the split, the run, and the model."""

from __future__ import annotations

import os
import posixpath
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.ml import Estimator
from pyspark.ml.param import Param

from horovod_runner.common.options import grouped
from horovod_runner.data.feed.fields import flat_names
from horovod_runner.data.feed.options import FeedOptions, Framework
from horovod_runner.data.read.staging import arrow_schema
from horovod_runner.data.scoring.first_rows import first_rows
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.errors import DataError
from horovod_runner.integrations.spark_ml.model import TrainedModel
from horovod_runner.integrations.spark_ml.params import ColumnParams, TrainingParams, set_named
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.spark_ml.plan import (
    Metric,
    Trained,
    TrainingFunction,
    TrainingPlan,
)
from horovod_runner.integrations.spark_ml.rows import TrainingRows, rows_of_trials, split
from horovod_runner.run.runner import HorovodRunner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.results.run import Run

_SPARKS: Final = ("featuresCol", "labelCol", "predictionCol", "probabilityCol")
_COPIED: Final = (
    *(name for name, value in vars(ColumnParams).items() if isinstance(value, Param)),
    *_SPARKS,
)


class HorovodEstimator(Estimator, TrainingParams, Saveable):  # type: ignore[misc]
    """Trains a model on a DataFrame, as Horovod ranks; base of the estimators.

    An argument is a Param of the same name: it has a setter and a getter, can be varied by a
    ParamGridBuilder, and ``explainParams()`` describes it.
    """

    framework: Framework = "torch"

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        set_named(self, params)

    def setParams(self, **params: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several Params."""
        return self._set(**params)

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
        shared = rows_of_trials(dataset, estimators)

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
        plan = self._plan()
        self._check(rows.train, plan)
        arguments = {"plan": plan, **self._trained_objects()}
        trained, run = self._launch(self._train(), arguments, rows)
        model = self._trained_model(trained)
        model.history, model.run = trained.history, run
        for name in _COPIED:
            if self.isSet(name):
                model._set(**{name: self.getOrDefault(name)})
        return model

    def _launch(
        self, function: TrainingFunction, arguments: Mapping[str, Any], rows: TrainingRows
    ) -> tuple[Trained, Run | None]:
        """Call a function on every rank, with its arguments and the rows; returns rank 0's value.

        Returns:
            The value, and the record of the run.
        """
        runner = HorovodRunner(**self.runner_arguments())
        trained = runner.run(function, **arguments, **rows.datasets(self.read_columns()))
        return trained, runner.last_run

    def read_columns(self) -> set[str]:
        """The columns that a training reads; a dotted name is a field of a struct."""
        weight = [self.weight] if self.weight else []
        return set(flat_names([*self.features.values(), *self.labels, *weight]))

    @abstractmethod
    def _train(self) -> TrainingFunction:
        """The function that the ranks run."""

    @abstractmethod
    def _trained_objects(self) -> dict[str, Any]:
        """The arguments of that function beside the plan and the rows."""

    @abstractmethod
    def _try(self, first: Mapping[str, Any], plan: TrainingPlan) -> None:
        """Try the model on a few rows, in this process.

        Raises:
            ValueError: it does not fit them; names the Param to change.
        """

    @abstractmethod
    def _trained_model(self, trained: Trained) -> TrainedModel:
        """The model that ``fit`` returns, with the network and the name of its loss."""

    def _needs(self) -> Sequence[str]:
        """Params without which there is nothing to train."""
        return ("model", "optimizer", "loss")

    def _plan(self) -> TrainingPlan:
        for name in self._needs():
            if self.value_of(name) is None:
                raise ValueError(
                    f"{type(self).__name__} requires {name}: {type(self).__name__}({name}=...) or "
                    f"set{name.capitalize()}(...)"
                )
        for name in ("batch_size", "epochs", "backward_passes_per_step"):
            if self.getOrDefault(name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {self.getOrDefault(name)}")
        batch_size = self.getOrDefault("batch_size")
        return TrainingPlan(
            features=self.features,
            labels=self.labels,
            weight=self.weight,
            options=self._feed_options(),
            loss=self.value_of("loss"),
            loss_weights=self.value_of("loss_weights"),
            metrics=_by_name(self.value_of("metrics")),
            batch_size=batch_size,
            val_batch_size=self.value_of("val_batch_size") or batch_size,
            epochs=self.getOrDefault("epochs"),
            steps=self.value_of("train_steps_per_epoch"),
            val_steps=self.value_of("validation_steps_per_epoch"),
            shuffle=self.getOrDefault("shuffle"),
            seed=self.getOrDefault("random_seed"),
            callbacks=tuple(self.value_of("callbacks") or ()),
            compression=self.value_of("gradient_compression"),
            backward_passes=self.getOrDefault("backward_passes_per_step"),
            learning_rate=self.value_of("learning_rate"),
            verbose=self.getOrDefault("verbose"),
            saves=self.value_of("checkpoint_dir") is not None
            or self.getOrDefault("max_restarts") > 0,
        )

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

    def _check(self, train: DataFrame, plan: TrainingPlan) -> None:
        """Check columns and model before anything is launched.

        Raises:
            DataError: a column does not exist or cannot become a tensor.
            ValueError: the model does not fit the columns.
        """
        options = FeedOptions(framework=self.framework, columns=plan.columns, **plan.options)
        try:
            inputs = Inputs.of(arrow_schema(train), options)
        except DataError as error:
            raise DataError(
                f"{error}. The columns are those of feature_cols (or featuresCol), label_cols (or "
                "labelCol) and sample_weight_col (or weightCol)"
            ) from error.__cause__
        for name in plan.labels:
            if not inputs.columns[name].is_fixed and inputs.columns[name].kind != "list":
                raise ValueError(
                    f"the label {name!r} is {inputs.columns[name].kind}, and a loss takes numbers: "
                    "index it first, pyspark.ml.feature.StringIndexer, or set labelCol to another "
                    "column"
                )
        first = first_rows(train, inputs)
        if first is None:
            raise DataError(
                "there are no rows without nulls to train with: check the query and validation. In "
                "a Pipeline, pyspark.ml.feature.Imputer replaces nulls"
            )
        self._try(inputs.settle(first).arrays(first), plan)


def _by_name(metrics: Any) -> dict[str, Metric]:
    if not metrics:
        return {}
    if not isinstance(metrics, Mapping):
        metrics = {getattr(each, "__name__", type(each).__name__): each for each in metrics}
    return {name: Metric(metric) for name, metric in metrics.items()}
