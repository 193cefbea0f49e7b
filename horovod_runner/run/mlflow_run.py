"""Finds the MLflow run that rank 0 joins with what it logs to MLflow by itself.

A driver without MLflow does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horovod_runner.common.options import Options

if TYPE_CHECKING:
    from horovod_runner.wire.job_file import MLflowRun

# Of env=: who sets these decides where ranks log.
_CHOSEN = ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI")


def active_run() -> Any:
    """MLflow's active run in this thread; None without one."""
    mlflow = sys.modules.get("mlflow")
    find = getattr(mlflow, "active_run", None)  # missing while it is imported
    return None if find is None else find()


def find_mlflow_run(
    active: Any, options: Options, notice: Callable[[str], None]
) -> MLflowRun | None:
    """The run of an MLflowSink, or else the active run.

    None without an MLflow run, and where ``env`` says where ranks log. ``active`` is the active run
    of the thread that called ``run`` or ``start``.
    """
    module = sys.modules.get("horovod_runner.sinks.mlflow")
    if any(name in options.env for name in _CHOSEN):
        return None
    patience = options.cluster_config.limits.mlflow_run
    for sink in options.sinks:
        if module is None or not isinstance(sink, module.MLflowSink):
            continue
        try:
            found: MLflowRun | None = sink.run_for_ranks(patience)
        except Exception as error:
            why = "" if isinstance(error, TimeoutError) else f" ({type(error).__name__}: {error})"
            notice(
                f"MLflow has not shown the run of MLflowSink within {patience:g} s{why}: what "
                "ranks log to MLflow themselves makes runs of its own. If the server is slow, "
                "raise limits=Limits(mlflow_run=...)"
            )
            return None
        if found is not None:
            return found
    if active is None:
        return None
    import mlflow

    from horovod_runner.sinks.mlflow import run_for_ranks

    return run_for_ranks(mlflow.get_tracking_uri(), active.info.run_id, active.info.experiment_id)
