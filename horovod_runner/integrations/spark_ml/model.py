"""What the fitted models of all frameworks share: predictions as columns, and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from pyspark.ml import Model

from horovod_runner.common.spark_session import quoted
from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.read import staging
from horovod_runner.data.scoring.models.kind import Recognized
from horovod_runner.data.scoring.predict import predict
from horovod_runner.errors import DataError
from horovod_runner.integrations.spark_ml.params import (
    ColumnParams,
    ModelOptions,
    set_named,
    with_params,
)
from horovod_runner.integrations.spark_ml.persistence import Saveable
from horovod_runner.integrations.training.classes import Classes, is_class_loss
from horovod_runner.integrations.training.training import options_of_inputs

if TYPE_CHECKING:
    import matplotlib.figure
    from mlflow.models.model import ModelInfo
    from pyspark.sql import DataFrame

    from horovod_runner.results.run import Run


@with_params(
    {
        "model": "the trained model",
        "transform_batch_size": "rows that the model gets at a time",
        "loss_name": "the loss that the model was trained with, such as 'CrossEntropyLoss': says "
        "whether outputs are scores of classes, and whether those are logits",
    }
)
class TrainedModel(Model, ColumnParams, Saveable):  # type: ignore[misc]
    """A trained model as a Spark ML model; base of the models.

    ``fit`` of an estimator returns one. One that was trained elsewhere is made from the network::

        PipelineModel([assembler, TorchModel(model=network, featuresCol="f", predictionCol="p")])

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
        ValueError: with ``task="classification"``, ``loss_name`` does not say what scores mean.

    Attributes:
        history: loss and metrics of each epoch, by name.
        run: the record of the run that trained it; None after ``load``.
    """

    _saved = ("history",)

    def __init__(self, **params: Unpack[ModelOptions]) -> None:
        super().__init__()
        self._setDefault(task="auto", transform_batch_size=4096, loss_name="")
        set_named(self, params)
        if params.get("task") == "classification" and not params.get("loss_name"):
            raise ValueError(
                "task='classification' needs loss_name, the loss that the model was trained with, "
                "such as 'CrossEntropyLoss' or 'binary_crossentropy': it says whether the model's "
                "scores are logits or probabilities"
            )
        if "model" in params:
            self._check_network(params["model"])
        self.history: Mapping[str, Sequence[float]] = {}
        self.run: Run | None = None

    def _check_network(self, network: Any) -> None:
        """Raise TypeError for a network of another framework."""
        raise NotImplementedError

    def getHistory(self) -> Mapping[str, Sequence[float]]:  # noqa: N802 - Horovod's name
        """Loss and metrics of each epoch, by name."""
        return self.history

    def log_model(
        self, name: str, dataset: DataFrame, *, registered_model_name: str | None = None
    ) -> ModelInfo:
        """Log the model to MLflow: to the active run, or to a new one.

        Args:
            name: of the model.
            dataset: its first rows give signature and input example.
            registered_model_name: also register the model under this name.

        Returns:
            What MLflow knows of the model; its ``model_uri`` leads to it.

        Raises:
            DataError: a feature column does not exist, or there are no rows.
            ImportError: MLflow is not installed.
            PredictionError: the model fails on the first rows.
        """
        from horovod_runner.data.scoring.logged_model import log_model

        kind = self._kind()
        example = staging.head(dataset, 5)
        if example is None:
            raise DataError("the DataFrame has no rows to make an example of")
        feed = {"columns": self.features, **self._scoring_options}
        return log_model(
            name,
            kind,
            self.getOrDefault("model"),
            FeedOptions(framework=kind.framework, **feed),
            example=example,
            output=self.outputs,
            registered_model_name=registered_model_name,
        )

    def plot(self) -> matplotlib.figure.Figure:
        """Draw the loss and the metrics by epoch; requires matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from horovod_runner.results.plot import plot_epochs

        return plot_epochs(self.history, type(self).__name__)

    def _is_classifier(self) -> bool:
        task = self.getOrDefault("task")
        if task not in ("auto", "classification", "regression"):
            raise ValueError(f"task must be 'auto', 'classification' or 'regression', not {task!r}")
        if task == "auto":
            return is_class_loss(self.getOrDefault("loss_name"))
        return bool(task == "classification")

    @property
    def _scoring_options(self) -> dict[str, Any]:
        return options_of_inputs(self.feed_options, self.features, self.labels)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql import functions

        if not self.isDefined("model"):
            raise ValueError(
                f"{type(self).__name__} has no network: set it by model=..., or get the model from "
                "an estimator's fit"
            )
        outputs = self.outputs
        is_classifier = self._is_classifier() and len(outputs) == 1
        post = Classes(self.getOrDefault("loss_name")) if is_classifier else None
        probability = self.getProbabilityCol()
        wanted = [*outputs, probability] if is_classifier else outputs
        scored = predict(
            dataset,
            Recognized(self._kind(), self.getOrDefault("model")),
            self.features,
            wanted,
            batch_size=self.getOrDefault("transform_batch_size"),
            postprocess=post,
            **self._scoring_options,
        )
        converted = {}
        for name in wanted:
            column = functions.col(quoted(name))
            type_ = scored.schema[name].dataType.simpleString()
            if type_ in ("array<float>", "array<double>"):
                column = array_to_vector(column.cast("array<double>"))
            elif type_ == "float":  # evaluators of Spark ML take double
                column = column.cast("double")
            converted[name] = column
        return scored.withColumns(converted)
