"""One training of Horovod's estimators: where it runs, what it goes on from, how `ml` does it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.options import Options
from horovod_runner.data.sources import parquet
from horovod_runner.host.folders.folder import local_path
from horovod_runner.integrations.horovod_spark import util
from horovod_runner.integrations.horovod_spark.backend import SparkBackend
from horovod_runner.integrations.horovod_spark.batches import Arrange, in_order
from horovod_runner.integrations.horovod_spark.outside import OutsideFunction
from horovod_runner.integrations.spark_ml.plan import Trained, TrainingPlan
from horovod_runner.integrations.spark_ml.rows import TrainingRows

if TYPE_CHECKING:
    from horovod_runner.integrations.horovod_spark.estimator import HorovodEstimator
    from horovod_runner.results.run import Run


class Training:
    """One call of ``fit``: where it runs, and what it goes on from.

    Args:
        estimator: Horovod's.
        backend: where the training function runs.
        run_id: the training's.
        epochs_before: epochs that earlier trainings with the same id have finished.
        number: of the rows in the store; None for the store's own paths.
        written: whether the store has the rows already.

    Attributes:
        optimizer: the state of the optimizer after the training, of torch.
    """

    def __init__(
        self,
        estimator: HorovodEstimator,
        backend: Any,
        run_id: str,
        *,
        epochs_before: int,
        number: Any,
        written: bool,
    ) -> None:
        self.estimator = estimator
        self.backend = backend
        self.run_id = run_id
        self.epochs_before = epochs_before
        self._number = number
        self._written = written
        self._folder = estimator._checkpoint_dir(run_id)
        self.optimizer: Any = None

    @property
    def saves(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._folder is not None

    def launch(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        rows: TrainingRows,
        columns: Sequence[str],
    ) -> tuple[Trained, Run | None]:
        """Call a training function on every rank; returns rank 0's value and the run's record."""
        if self._folder is not None and local_path(self._folder) is not None:
            os.makedirs(local_path(self._folder) or "", exist_ok=True)
        backend = self.backend
        if isinstance(backend, SparkBackend) and type(backend).run is SparkBackend.run:
            runner = backend.runner(**self._options())
            with backend.output():
                value = runner.run(function, **arguments, **rows.datasets(columns))
            return value, runner.last_run
        return self._outside(function, arguments, rows, columns), None

    def _options(self) -> dict[str, Any]:
        """Options of HorovodRunner that the estimator's Params decide."""
        options: dict[str, Any] = {"checkpoint_dir": self._folder}
        options["resume"] = self._folder is not None
        if not self.estimator.getUseGpu():
            options["gpus_per_rank"] = 0
        options["env"] = self.estimator._environment()
        options["sinks"] = (*self.backend.options.get("sinks", ()), *self._log_sinks())
        return options

    @property
    def logs(self) -> str | None:
        """The folder or URL of the run's logs in the store; None if they are not kept."""
        store = self.estimator.getStore()
        logs: str | None = None if store is None else store.get_logs_path(self.run_id)
        return logs

    def _log_sinks(self) -> list[Any]:
        """Writes TensorBoard's logs where the store has them, if that can be done."""
        logs = self.logs
        if logs is None or local_path(logs) is None:
            return []
        from horovod_runner.sinks.tensorboard import TensorBoardSink

        try:
            return [TensorBoardSink(logs)]
        except ImportError:
            return []

    def _outside(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        rows: TrainingRows,
        columns: Sequence[str],
    ) -> Trained:
        """Train with a backend of the user's own, whose ranks read the rows from the store."""
        estimator = self.estimator
        store = estimator.getStore()
        if store is None:
            raise ValueError(
                f"{type(self.backend).__name__} starts its ranks itself, and they read the rows "
                "from a store: set store=Store.create(folder that all hosts see)"
            )
        parts = self.backend.num_processes() * estimator.getOrDefault("partitions_per_process")
        paths = {"train": store.get_train_data_path, "valid": store.get_val_data_path}
        number = self._number if self._written else os.urandom(4).hex()
        sources, removed = {}, ExitStack()
        for name, dataset in rows.datasets(columns).items():
            path = paths[name](number)
            if not self._written:
                removed.callback(_remove, store, path)
                util.write_parquet(dataset, path, parts)
            options = getattr(store, "storage_options", None)
            sources[name] = parquet(path, storage_options=options or None)
        readers = {name: source.prepare(name, None) for name, source in sources.items()}
        token = os.urandom(4).hex()
        options = Options(np=-1, checkpoint_dir=self._folder, resume=self._folder is not None)
        with removed, Archive(token, options) as archive:
            whole = OutsideFunction.of(
                function,
                arguments,
                readers,
                estimator.library,
                checkpoints=archive.plan(1) if self.saves else None,
                use_gpu=estimator.getUseGpu(),
            )
            values = self.backend.run(whole, args=(), kwargs={}, env=estimator._environment())
        trained: Trained = values[0]
        return trained


def _remove(store: Any, path: str) -> None:
    """Remove a folder of rows from a store; what cannot be removed stays."""
    with suppress(Exception):  # every filesystem raises others
        store.fs.rm(store.get_localized_path(path), recursive=True)


def arrange(
    theirs: HorovodEstimator,
    inputs: Mapping[str, str],
    *,
    input_shapes: Sequence[Sequence[int]],
    label_shapes: Sequence[Sequence[int]],
    dtypes: Mapping[str, str] | str,
) -> Arrange:
    """What makes the batches of a training as Horovod's estimator makes them.

    Args:
        theirs: Horovod's estimator.
        inputs: the column of each input, by part.
        input_shapes: the shapes of the inputs, in order; fewer leave the others as they are.
        label_shapes: the shapes of the labels, in order.
        dtypes: what the numbers of a part become, by part or for all.
    """
    labels = {f"label {name}": name for name in theirs.getLabelCols()}
    shapes = {
        **dict(zip(inputs, input_shapes, strict=False)),
        **dict(zip(labels, label_shapes, strict=False)),
    }
    columns = {**inputs, **labels}
    weight = theirs.getSampleWeightCol()
    if weight is not None:
        columns["weight of the row"] = weight
    if isinstance(dtypes, str):
        dtypes = dict.fromkeys(columns, dtypes)
    return Arrange(columns, shapes, dtypes, theirs.getTransformationFn())


class Launched:
    """Mixed into estimators of `ml`: they train where Horovod's estimator says, and as it does."""

    training: Training

    #: What changes the batches; None changes nothing.
    arrange: Arrange | None = None

    @property
    def inputs(self) -> dict[str, str]:
        """The column of each input, in order, whatever the names of the model's parameters are."""
        return in_order(self.training.estimator.getFeatureCols())

    @property
    def features(self) -> dict[str, str | list[str]]:
        """The model's inputs, as an estimator of `ml` has them."""
        return {**self.inputs}

    def _feed_options(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("images", "dtypes", "pad_ragged"))
        return {**nothing, "transform": self.arrange}

    def _plan(self) -> TrainingPlan:
        plan: TrainingPlan = super()._plan()  # type: ignore[misc]
        return replace(plan, saves=self.training.saves, scales_learning_rate=True)

    def _launch(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], rows: TrainingRows
    ) -> tuple[Trained, Run | None]:
        columns = sorted(self.read_columns())  # type: ignore[attr-defined]
        return self.training.launch(function, arguments, rows, columns)
