"""Writes a run to MLflow: parameters, metrics, checkpoints and final status."""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from horovod_runner.common.text import has_password, without_password
from horovod_runner.host.folders.folder import local_path
from horovod_runner.sinks.summary import MeasuringSink, write_files
from horovod_runner.wire.job_file import MLflowRun
from horovod_runner.worker.mlflow_run import absolute

if TYPE_CHECKING:
    from horovod_runner.checkpoints.checkpoint import Checkpoint
    from horovod_runner.results.run import Run
    from horovod_runner.wire.events import Report

_STATUS: Final = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_TAG: Final = "horovod_runner"
# MLflow's limits for a request and for a name.
_BATCH: Final = 1000
_NAME_LENGTH: Final = 250
_TAG_LENGTH: Final = 5000


class MLflowSink(MeasuringSink):
    """Writes a run to MLflow.

        with mlflow.start_run():
            HorovodRunner(np=4, sinks=[MLflowSink()]).run(main, learning_rate=0.1)

    The data go to the MLflow run that is active where ``run`` or ``start`` is called, otherwise to
    a new one. A new run ends as FINISHED, FAILED or (after a cancel) KILLED. An active run stays
    open: the code that started it ends it. Both get the tags ``horovod_runner.run_id``,
    ``.status`` and, where there are any, ``.warnings`` and, after a restart, ``.attempts``.

    Parameters are ``last_run.params``; a parameter that an active run already has stays unchanged.
    Metrics are indexed by step, or by the count of the rank's reports if none has a step. The epoch
    is logged as a metric. Metrics of ranks other than 0 (``report_ranks="all"``) are named
    ``rank1/loss``. A character that MLflow does not allow in a name becomes "_". NaN and infinity
    are sent unchanged; MLflow's databases store the largest float in place of infinity.

    What the run measures of itself is logged every ten seconds: where a step's milliseconds go,
    ``profile/rank0/compute_ms``, indexed by the steps of rank 0; and system metrics with MLflow's
    names, ``system/rank0/cpu_utilization_percentage``, indexed by their count. Other ranks are in
    ``min``, ``median`` and ``max`` in place of ``rank0``. At the end tables, diagnosis and flame
    graphs become artifacts in the folder ``profile``.

    Args:
        tracking_uri: the MLflow server or store. None uses MLflow's current setting. With a
            different URI the active run does not count, and a new run is created.
        experiment: the name of a new run's experiment, which is created if it does not exist. None
            uses MLflow's current experiment.
        run_name: the name of a new run; None lets MLflow choose.
        log_checkpoints: whether checkpoints become artifacts, in the folder ``checkpoints``. MLflow
            keeps all of them, whatever ``num_to_keep`` says. A checkpoint in remote storage is not
            copied; the tag ``horovod_runner.checkpoint`` then holds the URL of the latest one.
        log_profile: whether to log what the run measures of itself.

    Attributes:
        run_id: the id of the latest MLflow run; None before the first run.

    Raises:
        ImportError: MLflow is not installed.
        ValueError: MLflow cannot write to ``tracking_uri``.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        log_checkpoints: bool = True,
        log_profile: bool = True,
    ) -> None:
        try:
            import mlflow
            from mlflow import MlflowClient
        except ImportError as error:
            raise ImportError(
                "MLflowSink writes with MLflow: pip install 'horovod_runner[mlflow]'"
            ) from error
        try:
            self._client: Any = MlflowClient(tracking_uri)
        except Exception as error:
            where, why = tracking_uri or mlflow.get_tracking_uri(), str(error).rstrip(".")
            raise ValueError(
                f"MLflow cannot write to {without_password(where)}: {without_password(why)}. Set "
                "tracking_uri (or MLFLOW_TRACKING_URI) to a server. Or install the full package: "
                "pip install mlflow. Or use a folder, file:mlruns, with "
                "MLFLOW_ALLOW_FILE_STORE=true."
            ) from (None if has_password(why) else error)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._log_checkpoints = log_checkpoints
        super().__init__(log_profile)
        self._begun = threading.Event()
        self.run_id: str | None = None
        self._given = self  # the user's own object
        self._callers_run: Any = None  # which is active in the thread that called run or start

    def of_run(self, active: Any) -> Self:
        """As in :class:`~horovod_runner.sinks.summary.MeasuringSink`."""
        own = super().of_run(active)
        own._given, own._callers_run = self, active
        return own

    def prepare(self) -> None:
        """As in :class:`~horovod_runner.sinks.Sink`, like all methods below."""
        self._show(None)
        self._begun = threading.Event()
        try:
            self._find_run()
        except Exception:
            self._begun.set()
            raise

    def _find_run(self) -> None:
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.tracking.fluent import _get_experiment_id

        # Read MLflow's settings here: they may have changed since the sink was created.
        self._client = mlflow.MlflowClient(self._tracking_uri)
        is_default_uri = self._tracking_uri in (None, mlflow.get_tracking_uri())
        active = (self._callers_run or mlflow.active_run()) if is_default_uri else None
        self._active: str | None = None if active is None else active.info.run_id
        self._experiment_id = "0"  # the default experiment
        self._tags: dict[str, str] = {}
        if active is None:
            self._tags = resolve_tags()
            if is_default_uri and self._experiment is None:
                self._experiment_id = _get_experiment_id() or self._experiment_id

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._metrics: list[Any] = []
        self._epochs: dict[int, int] = {}
        self._summaries = 0
        try:
            run_id = self._active or self._new_run()
            self._show(run_id)
            self._set("run_id", run.run_id)
            self._log_params(run)
        finally:
            self._begun.set()

    def _show(self, run_id: str | None) -> None:
        self.run_id = self._given.run_id = run_id

    def run_for_ranks(self, patience: float) -> MLflowRun | None:
        """The MLflow run to which rank 0 logs, too; None if the sink has failed.

        Raises:
            TimeoutError: MLflow has not answered in time.
        """
        if not self._begun.wait(patience):
            raise TimeoutError
        if self.run_id is None:
            return None
        experiment = self._client.get_run(self.run_id).info.experiment_id
        return run_for_ranks(self._client.tracking_uri, self.run_id, experiment)

    def _new_run(self) -> str:
        experiment = self._experiment_id
        if self._experiment is not None:
            existing = self._client.get_experiment_by_name(self._experiment)
            experiment = (
                self._client.create_experiment(self._experiment)
                if existing is None
                else existing.experiment_id
            )
        created = self._client.create_run(experiment, tags=self._tags, run_name=self._run_name)
        return str(created.info.run_id)

    def _log_params(self, run: Run) -> None:
        from mlflow.entities import Param

        # MLflow refuses to change a parameter that the active run already has.
        existing = {} if self._active is None else self._client.get_run(self.run_id).data.params
        named = {_name(name): str(value) for name, value in run.params.items()}
        params = [Param(name, value) for name, value in named.items() if name not in existing]
        self._client.log_batch(self.run_id, params=params)

    def attempt(self, number: int) -> None:
        if number > 1:
            self._set("attempts", str(number))

    def report(self, report: Report) -> None:
        from mlflow.entities import Metric

        rank = report.rank
        step = self._steps[rank].step_of(report)
        numbers = dict(report.metrics)
        if report.epoch is not None and self._epochs.get(rank) != report.epoch:
            numbers["epoch"] = self._epochs[rank] = report.epoch
        millis = max(0, int(report.time * 1000))
        prefix = f"rank{rank}/" if rank else ""
        self._metrics += [
            Metric(_name(prefix + name), float(value), millis, step)
            for name, value in numbers.items()
        ]
        self._flush_if_due()

    def _flush_if_due(self) -> None:
        super()._flush_if_due()
        if len(self._metrics) >= _BATCH:
            self._flush()

    def _write_summary(self) -> None:
        from mlflow.entities import Metric

        millis = int(time.time() * 1000)
        for name, value in self._summary.take().items():
            step = self._summaries if name.startswith("system/") else self._summary.steps
            self._metrics.append(Metric(name, value, millis, step))
        self._summaries += 1

    def _flush(self) -> None:
        metrics, self._metrics = self._metrics, []
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _BATCH])

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        if not self._log_checkpoints:
            return
        self._flush()  # the upload may take long
        path = local_path(checkpoint.path)
        if path is None:
            self._set("checkpoint", without_password(checkpoint.path))
            return
        try:
            self._client.log_artifact(self.run_id, str(path), "checkpoints")
        except Exception:
            if path.exists():
                raise
            # `num_to_keep` has deleted it meanwhile: there is a newer one.

    def end(self, run: Run) -> None:
        if self._summary.has_any:
            self._write_summary()
        self._flush()
        self._set("status", run.status)
        if run.warnings:
            self._set("warnings", " ".join(run.warnings)[:_TAG_LENGTH])
        try:
            if self._summary.has_any:
                with tempfile.TemporaryDirectory(prefix="horovod_runner-profile-") as folder:
                    write_files(run, Path(folder))
                    self._client.log_artifacts(self.run_id, folder, "profile")
        finally:
            if self._active is None:
                self._client.set_terminated(self.run_id, _STATUS[run.status])

    def _set(self, name: str, value: str) -> None:
        self._client.set_tag(self.run_id, f"{_TAG}.{name}", value)


def run_for_ranks(tracking_uri: str, run_id: str, experiment_id: str) -> MLflowRun:
    """Describe an MLflow run for the ranks, with MLflow's settings on this driver."""
    uri = absolute(tracking_uri)
    variables = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    variables.pop("MLFLOW_EXPERIMENT_NAME", None)  # it has an id
    with suppress(Exception):  # no credentials here, or a version without it
        from mlflow.utils.databricks_utils import get_databricks_env_vars

        variables.update(get_databricks_env_vars(tracking_uri))
    variables |= {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_RUN_ID": run_id,
        "MLFLOW_EXPERIMENT_ID": experiment_id,
    }
    return MLflowRun(run_id, experiment_id, uri, variables)


@lru_cache(maxsize=4096)
def _name(name: str) -> str:
    """Turn a name into one that MLflow allows: letters, digits, ``_-.:/``, spaces; a clean path."""
    allowed = re.sub(r"[^\w\-.:/ ]", "_", name)[:_NAME_LENGTH]
    return posixpath.normpath(allowed).lstrip("./") or "_"
