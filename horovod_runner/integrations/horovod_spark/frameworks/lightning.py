"""``horovod.spark.lightning``: TorchEstimator and TorchModel, for Lightning modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from horovod_runner.data.scoring.models.kind import FunctionKind, Recognized
from horovod_runner.integrations.horovod_spark.batches import Arrange
from horovod_runner.integrations.horovod_spark.frameworks import torch as of_torch
from horovod_runner.integrations.horovod_spark.frameworks.store_trainings import (
    StoreLightningTraining,
)
from horovod_runner.integrations.horovod_spark.kinds import NamesKind, RowByRow
from horovod_runner.integrations.horovod_spark.params import UNUSED, EstimatorParams
from horovod_runner.integrations.spark_ml.params import with_params

if TYPE_CHECKING:
    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.integrations.training.training import Trained, Training

__all__ = ["MIN_PL_VERSION", "EstimatorParams", "TorchEstimator", "TorchModel"]

#: The oldest Lightning that this estimator works with.
MIN_PL_VERSION: Final = "2.0.0"
_PARAMS: Final = {
    "num_gpus": "not used: a rank has the GPUs that Spark gives it",
    "logger": "a logger of Lightning; unset: TensorBoard's, into the store",
    "log_every_n_steps": "steps between two lines of the logger",
    "loader_num_epochs": UNUSED,
    "terminate_on_nan": "end the training at a loss that is no number",
    "profiler": "a profiler of Lightning",
    "trainer_args": "further arguments of the Trainer",
    "debug_data_loader": UNUSED,
    "train_async_data_loader_queue_size": UNUSED,
    "val_async_data_loader_queue_size": UNUSED,
}


@with_params(_PARAMS)
class TorchEstimator(of_torch.TorchEstimator):
    """Trains a Lightning module on a DataFrame, as ``horovod.spark.lightning.TorchEstimator``.

    The module's steps get a dict of tensors by column. A torch module that is no Lightning module
    is trained with ``optimizer`` and ``loss``, as by ``horovod.spark.torch``.

    Args:
        params: the Params, by name: see ``explainParams()``.

    Raises:
        TypeError: there is no such Param, or a value has the wrong type.
    """

    _own_defaults: ClassVar = {
        **of_torch.TorchEstimator._own_defaults,
        **dict.fromkeys(_PARAMS),
        "terminate_on_nan": False,
        "debug_data_loader": False,
        "log_every_n_steps": 50,
    }

    @property
    def _is_lightning(self) -> bool:
        return hasattr(self.getModel(), "training_step")

    def _needs(self) -> Sequence[str]:
        return () if self._is_lightning else super()._needs()

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

    def _training(self, logs: str | None, **arguments: Any) -> Training:
        if not self._is_lightning:
            return super()._training(logs, **arguments)
        features, labels = self.getFeatureCols(), self.getLabelCols()
        # By column: the module's steps get a dict by column.
        columns = {name: name for name in (*features, *labels)}
        # The check before gets labels as other estimators do.
        checked = {f"label {name}": name for name in labels}
        arrange = self._arrangement({**columns, **checked})
        return StoreLightningTraining(
            **arguments,
            features={name: name for name in features},
            options={"transform": arrange},
            trainer_options=self._trainer_options(),
            logs=logs,
        )

    def _arrangement(self, columns: Mapping[str, str]) -> Arrange | None:
        """What ``transformation_fn`` does with a batch; None without it."""
        function, removed = self.getTransformationFn(), self.getTransformationRemovedFields() or ()
        edited = {}
        for each in self.getTransformationEditFields() or ():
            try:
                name, dtype, _shape, _is_nullable = list(each)
                edited[str(name)] = np.dtype(dtype).name
            except (TypeError, ValueError) as error:
                raise ValueError(
                    "transformation_edit_fields must be a list of tuples (name, NumPy type, shape, "
                    f"is nullable), and one is {each!r}: {error}"
                ) from None
        if function is None and not edited and not removed:
            return None
        return Arrange(columns, row=function or dict, edited=edited, removed=tuple(removed))

    def _with_doubles(self, training: Training, doubles: Mapping[str, bool]) -> Training:
        """In batches too: columns of one number, and others before ``transformation_fn``."""
        training = super()._with_doubles(training, doubles)
        if not isinstance(training, StoreLightningTraining):
            return training
        wanted = [
            name
            for name, is_number in doubles.items()
            if name in training.read_columns and (is_number or training.options["transform"])
        ]
        return replace(training, doubles=wanted)

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
        self, network: Any, trained: Trained, epochs_before: int, run_id: str, metadata: Any
    ) -> Any:
        if not self._is_lightning:
            return super()._create_model(network, trained, epochs_before, run_id, metadata)
        history = {name: values[-1] for name, values in trained.history.items() if values}
        kwargs = self._get_model_kwargs(network, history, None, run_id, metadata)
        return self.get_model_class()(**kwargs)

    def get_model_class(self) -> type[Any]:
        """The class of the model that ``fit`` returns."""
        return TorchModel


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

    def _scored(self, columns: Mapping[str, str]) -> Recognized:
        function = self.get_prediction_fn()
        if function is None:
            return super()._scored(columns)
        model = self.getModel().eval()
        return Recognized(NamesKind(FunctionKind()), RowByRow(model, function, dict(columns)))

    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        if self.get_prediction_fn() is None:
            return super()._arrange(columns)
        return Arrange(columns)
