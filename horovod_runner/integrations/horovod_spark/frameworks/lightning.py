"""``horovod.spark.lightning``: TorchEstimator and TorchModel, for Lightning modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from horovod_runner.data.scoring.models.kind import FunctionKind
from horovod_runner.integrations import spark_ml as ml
from horovod_runner.integrations.horovod_spark.batches import Arrange
from horovod_runner.integrations.horovod_spark.frameworks import torch as of_torch
from horovod_runner.integrations.horovod_spark.kinds import NamesKind, RowByRow
from horovod_runner.integrations.horovod_spark.params import EstimatorParams
from horovod_runner.integrations.horovod_spark.training import Launched, Training
from horovod_runner.integrations.spark_ml.params import declare, with_accessors
from horovod_runner.integrations.spark_ml.plan import TrainingFunction

if TYPE_CHECKING:
    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.data.scoring.models.kind import ModelKind
    from horovod_runner.integrations.spark_ml.model import TrainedModel

__all__ = ["MIN_PL_VERSION", "EstimatorParams", "TorchEstimator", "TorchModel"]

#: The oldest Lightning that this estimator works with.
MIN_PL_VERSION: Final = "2.0.0"
_UNUSED = "not used: the feed of the rows needs no such setting"


@with_accessors
class TorchEstimator(of_torch.TorchEstimator):
    """Trains a Lightning module on a DataFrame, as ``horovod.spark.lightning.TorchEstimator``.

    The module's steps get a dict of tensors by column. A torch module that is no Lightning module
    is trained with ``optimizer`` and ``loss``, as by ``horovod.spark.torch``.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    num_gpus = declare("num_gpus", "not used: a rank has the GPUs that Spark gives it")
    logger = declare("logger", "a logger of Lightning; unset: TensorBoard's, into the store")
    log_every_n_steps = declare("log_every_n_steps", "steps between two lines of the logger")
    loader_num_epochs = declare("loader_num_epochs", _UNUSED)
    terminate_on_nan = declare("terminate_on_nan", "end the training at a loss that is no number")
    profiler = declare("profiler", "a profiler of Lightning")
    trainer_args = declare("trainer_args", "further arguments of the Trainer")
    debug_data_loader = declare("debug_data_loader", _UNUSED)
    train_async_data_loader_queue_size = declare("train_async_data_loader_queue_size", _UNUSED)
    val_async_data_loader_queue_size = declare("val_async_data_loader_queue_size", _UNUSED)

    def _defaults(self) -> dict[str, Any]:
        unset = ("num_gpus", "logger", "loader_num_epochs", "profiler", "trainer_args")
        queues = ("train_async_data_loader_queue_size", "val_async_data_loader_queue_size")
        flags = {"terminate_on_nan": False, "debug_data_loader": False, "log_every_n_steps": 50}
        return {**super()._defaults(), **dict.fromkeys((*unset, *queues)), **flags}

    @property
    def _is_lightning(self) -> bool:
        return hasattr(self.getModel(), "training_step")

    def _check_params(self) -> None:
        super()._check_params()
        if self._is_lightning:
            for name, method in (("optimizer", "configure_optimizers"), ("loss", "training_step")):
                if self.getOrDefault(name):
                    raise ValueError(
                        f"{name} has no effect on a LightningModule: leave it out, and write it "
                        f"into {method}"
                    )

    def _epochs_of(self, checkpoint: Checkpoint) -> int:
        # Lightning counts from 0.
        return super()._epochs_of(checkpoint) + int(self._is_lightning)

    def _estimator(self, training: Training) -> Any:
        if not self._is_lightning:
            return of_torch.torch_estimator(training)
        given = self._common(training)
        given.pop("loss_weights", None)
        estimator = _Estimator(**given, trainer_options=self._trainer_options())
        estimator.training = training
        function = self.getTransformationFn()
        if function is not None:
            features, labels = self.getFeatureCols(), self.getLabelCols()
            # The ranks get all by column; the check before gets labels as other estimators do.
            columns = {name: name for name in (*features, *labels)}
            checked = {f"label {name}": name for name in labels}
            estimator.arrange = Arrange({**columns, **checked}, row=function)
        return estimator

    def _trainer_options(self) -> dict[str, Any]:
        given = {
            "logger": self.getLogger(),
            "log_every_n_steps": self.getLogEveryNSteps(),
            "profiler": self.getProfiler(),
            "detect_anomaly": True if self.getTerminateOnNan() else None,
        }
        options = {name: value for name, value in given.items() if value is not None}
        options["num_sanity_val_steps"] = 0  # as Horovod's estimator has it
        return {**options, **(self.getTrainerArgs() or {})}

    def _create_model(
        self, fitted: TrainedModel, run_id: str, metadata: Mapping[str, Any], training: Training
    ) -> Any:
        if not self._is_lightning:
            return super()._create_model(fitted, run_id, metadata, training)
        history = {name: values[-1] for name, values in fitted.history.items() if values}
        module = fitted.getOrDefault("model")
        kwargs = self._get_model_kwargs(module, history, None, run_id, metadata)
        model = self.get_model_class()(**kwargs)
        model.run = fitted.run
        return model

    def get_model_class(self) -> type[Any]:
        """The class of the model that ``fit`` returns."""
        return TorchModel


class _Estimator(Launched, ml.LightningEstimator):
    """The estimator of `ml` that trains as Horovod's does."""

    @property
    def inputs(self) -> dict[str, str]:
        """The column of each input, by itself: the module's steps get a dict by column."""
        return {name: name for name in self.training.estimator.getFeatureCols()}

    def _train(self) -> TrainingFunction:
        return TrainingFunction(
            "horovod_runner.integrations.horovod_spark.frameworks.lightning_training"
        )

    def _trained_objects(self) -> dict[str, Any]:
        return {**super()._trained_objects(), "logs": self.training.logs}


@with_accessors
class TorchModel(of_torch.TorchModel):
    """A trained Lightning module, as ``horovod.spark.lightning.TorchModel``.

    A subclass may override :meth:`get_prediction_fn`.

    Args:
        params: the Params, by name: see ``explainParams()``.
    """

    def get_prediction_fn(self) -> Callable[[Any, Mapping[str, Any]], Any] | None:
        """A function of (model, row) to the outputs of one row; None calls the module with batches.

        A row is a dict of the feature columns.
        """
        return None

    def _scored(self, columns: Mapping[str, str]) -> tuple[ModelKind, Any]:
        function = self.get_prediction_fn()
        if function is None:
            return super()._scored(columns)
        model = self.getModel().eval()
        return NamesKind(FunctionKind()), RowByRow(model, function, dict(columns))

    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        if self.get_prediction_fn() is None:
            return super()._arrange(columns)
        return Arrange(columns)
