"""What `fit` returns: the trained network, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from horovod_runner.data.scoring.predict import predict
from horovod_runner.integrations.training.classes import Classes, is_class_loss, loss_name
from horovod_runner.integrations.training.training import options_of_inputs

if TYPE_CHECKING:
    import matplotlib.figure

    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.integrations.training.training import Trained, Training
    from horovod_runner.results.run import Run


class Fitted:
    """A trained network.

    Attributes:
        run: the record of the run that trained it.
        history: loss and metrics of each epoch, by name; those of the rows to validate with begin
            with ``val_``. For a Keras network that was continued it begins with the last epoch of
            the checkpoint, which has the metrics of no other.
    """

    def __init__(self, training: Training, trained: Trained, run: Run) -> None:
        self._training = training
        self._trained = trained
        self.run = run
        self.history: Mapping[str, Sequence[float]] = trained.history

    @cached_property
    def model(self) -> Any:
        """The network with the weights of the last epoch, on the CPU, in evaluation mode."""
        return self._training.trained_model(self._trained)

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and metrics of the last epoch, by name."""
        return {name: values[-1] for name, values in self.history.items()}

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the best epoch by ``monitor``; None without checkpoints."""
        return self.run.best_checkpoint

    def plot(self) -> matplotlib.figure.Figure:
        """Draw loss and metrics by epoch; requires matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from horovod_runner.results.plot import plot_epochs

        return plot_epochs(self.history, f"{len(self)} epochs")

    def predict(self, data: Any, *, batch_size: int = 4096, raw: bool = False) -> Any:
        """Add the network's outputs to rows, as columns.

        A network with a loss of classes gives "prediction", the class, and "probability", an array.
        Others give "prediction", or "prediction_<label>" for each of several labels.

        Args:
            data: a DataFrame of Spark or pandas, or an Arrow table, with the columns of ``x``.
            batch_size: the most rows that the network gets at a time.
            raw: whether "prediction" is what the network returns, for losses of classes, too.

        Returns:
            The same kind of DataFrame or table, with the new columns.

        Raises:
            DataError: a column does not exist or cannot become a tensor.
            PredictionError: the network fails on the rows.
        """
        training = self._training
        labels = training.labels
        name = "" if training.loss is None else loss_name(training.loss)
        outputs = ["prediction"]
        post = None
        if is_class_loss(name) and len(labels) == 1 and not raw:
            outputs, post = ["prediction", "probability"], Classes(name, "int64")
        elif len(labels) > 1:
            outputs = [f"prediction_{label}" for label in labels]
        return predict(
            data,
            self.model,
            dict(training.features) or None,
            outputs,
            batch_size=batch_size,
            postprocess=post,
            **options_of_inputs(training.options, training.features, labels),
        )

    def __len__(self) -> int:
        """How many epochs were trained."""
        return max((len(values) for values in self.history.values()), default=0)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"<Fitted: {len(self)} epochs, {numbers}>"
