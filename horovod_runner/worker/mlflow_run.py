"""Joins what a rank logs to MLflow by itself to the driver's MLflow run.

The Trainer's MLflowCallback, Lightning's MLFlowLogger and ``mlflow.log_metric`` in ``main`` would
each make an MLflow run. Rank 0 logs to the driver's run in place of that. The other ranks log
nothing, unless ``main`` asks for it: by ``run_id=``, ``parent_run_id=`` or ``nested=True``, or by
another server or experiment.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

from horovod_runner.wire.job_file import MLflowRun
from horovod_runner.worker import api, context
from horovod_runner.worker.checks import notes
from horovod_runner.worker.imports.patches import instead_of

#: The id of a run that is in no store: of ranks that log nothing.
_NOWHERE: Final = "0" * 32
_OWN_RUN: Final = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")
_READS: Final = ("get_", "list_", "search_", "download_")
_WORKSPACES: Final = ("databricks", "databricks-uc")  # their URIs need no profile


def absolute(uri: str) -> str:
    """The URI of a store; of a folder, its absolute path as a URI."""
    scheme, colon, _ = uri.partition(":")
    if uri in _WORKSPACES or (colon and scheme != "file"):
        return uri
    # MLflow unquotes a path without a scheme, too.
    return Path(unquote(urlparse(uri).path if colon else uri)).absolute().as_uri()


def enter(run: MLflowRun) -> None:
    """Set MLflow's variables for what rank 0 logs, and for its child processes."""
    if run.variables and _sees(run):
        for name in _OWN_RUN:
            os.environ.pop(name, None)
        os.environ.update(run.variables)


def patch_fluent(module: Any) -> None:
    """Join a rank's runs to the driver's; called with the module ``mlflow.tracking.fluent``."""
    begin = inspect.signature(module.start_run)

    @instead_of(module, "start_run")
    def start_run(plain: Any, *args: Any, **options: Any) -> Any:
        run, stack, given = _run(), _active(module), begin.bind(*args, **options).arguments
        nested, is_asked = given.get("nested"), given.get("run_id") or given.get("parent_run_id")
        if run is None and not is_asked and not nested:
            _warn_of_many()
        # Another active run that is not nested: MLflow raises an error.
        if run is None or is_asked or (stack and not nested):
            return plain(**given)
        is_nowhere = bool(stack) and stack[-1].info.run_id == _NOWHERE
        if nested and not is_nowhere:
            if "parent_run_id" in begin.parameters and not stack:
                given["parent_run_id"] = run.run_id
        elif not is_nowhere and not _is_ours(module, run, given.get("experiment_id")):
            pass
        elif not run.variables:  # a rank other than 0
            stack.append(module.ActiveRun(_run_nowhere(run)))
            return stack[-1]
        elif _sees(run):
            given.pop("run_name", None)  # or the driver's run would be renamed
            return plain(**{**given, "run_id": run.run_id})
        else:
            _warn_of_hidden(run)
        os.environ.pop("MLFLOW_RUN_ID", None)  # it would be joined in place of a new run
        return plain(**given)

    for name, method in inspect.getmembers(module.MlflowClient, inspect.isfunction):
        if "run_id" in inspect.signature(method).parameters and not name.startswith("_"):
            _leave_out(module.MlflowClient, name, method)

    @instead_of(module.MlflowClient, "set_terminated")
    def set_terminated(plain: Any, self: Any, run_id: str, *args: Any, **options: Any) -> None:
        run = _run()
        if run is None or run_id != run.run_id:  # the driver ends its run itself
            plain(self, run_id, *args, **options)

    @instead_of(module.MlflowClient, "log_param")
    def log_param(plain: Any, self: Any, run_id: str, key: str, value: Any, **options: Any) -> Any:
        if key in _refused(self, run_id, {key: value}):
            return value
        return plain(self, run_id, key, value, **options)

    @instead_of(module.MlflowClient, "log_batch")
    def log_batch(plain: Any, *args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        params = given.get("params", ())
        values = {each.key: each.value for each in params}
        refused = _refused(given["self"], given["run_id"], values)
        given["params"] = [each for each in params if each.key not in refused]
        return plain(**given)

    signature = inspect.signature(log_batch)


def patch_logger(module: Any) -> None:
    """Let Lightning's MLFlowLogger log to the driver's run; called with its module."""
    signature = inspect.signature(module.MLFlowLogger.__init__)

    @instead_of(module.MLFlowLogger, "__init__")
    def init(plain: Any, self: Any, *args: Any, **options: Any) -> None:
        run = _run()
        given = signature.bind(self, *args, **options).arguments
        # On the other ranks the logger does nothing.
        if run is not None and run.variables and not given.get("run_id") and _sees(run):
            uri = given.get("tracking_uri") or run.tracking_uri
            name = given.get("experiment_name")
            if absolute(uri) == run.tracking_uri and _is_named(run, name):
                given.update(tracking_uri=run.tracking_uri, run_id=run.run_id)
                plain(**given)
                return
        plain(self, *args, **options)


def _run() -> MLflowRun | None:
    rank = context.current()
    return None if rank is None else rank.mlflow_run


def _sees(run: MLflowRun) -> bool:
    """Whether this host reaches the store of a run, as far as its files say."""
    scheme, _, rest = run.tracking_uri.partition("://")
    path = unquote(rest.partition("?")[0])
    if scheme == "file":
        return Path(path, run.experiment_id, run.run_id).is_dir()
    return scheme != "sqlite" or Path(path.removeprefix("/")).is_file()


def _active(module: Any) -> list[Any]:
    """MLflow's stack of active runs; of this thread, in newer versions."""
    stack = module._active_run_stack
    runs: list[Any] = stack.get() if hasattr(stack, "get") else stack
    return runs


def _is_ours(module: Any, run: MLflowRun, experiment_id: Any) -> bool:
    """Whether ``main`` has chosen no other experiment, nor given its id, and no other server."""
    uri = run.tracking_uri
    for chosen in (experiment_id, getattr(module, "_active_experiment_id", None)):
        if chosen is not None and str(chosen) != run.experiment_id:
            return False
    return not uri or absolute(module.MlflowClient().tracking_uri) == uri


def _is_named(run: MLflowRun, name: str | None) -> bool:
    """Whether the experiment of a run has this name; None stands for any."""
    if name is None:
        return True
    from mlflow import MlflowClient

    return bool(MlflowClient(run.tracking_uri).get_experiment(run.experiment_id).name == name)


def _warn_of_many() -> None:
    rank = context.current()
    if rank is not None and rank.rank > 0 and not os.environ.get("MLFLOW_RUN_ID"):
        notes.mistake(
            "mlflow",
            "main starts a run of MLflow on every rank, so MLflow shows as many runs as there "
            "are ranks. Call HorovodRunner inside `with mlflow.start_run():`, or give it "
            "sinks=[MLflowSink()]: then rank 0 logs to that run, and the other ranks to none.",
        )


def _warn_of_hidden(run: MLflowRun) -> None:
    notes.mistake(
        "mlflow store",
        f"rank 0 logs to MLflow, and the folder of the driver's run {run.run_id} is not on "
        "this rank's host, so MLflow has another run for it. Use an MLflow server, or a "
        "folder that all hosts share.",
    )


def _run_nowhere(run: MLflowRun) -> Any:
    from mlflow.entities import Run, RunData, RunInfo

    values = {
        "run_id": _NOWHERE,
        "run_uuid": _NOWHERE,  # its name in MLflow 2
        "experiment_id": run.experiment_id,
        "user_id": "",
        "status": "RUNNING",
        "start_time": 0,
        "end_time": None,
        "lifecycle_stage": "active",
        "run_name": "",
    }
    return Run(RunInfo.from_dictionary(values), RunData())


def _leave_out(client: Any, name: str, method: Any) -> None:
    """Have a method of the client do nothing for the run that is in no store."""
    signature = inspect.signature(method)

    @instead_of(client, name)
    def call(plain: Any, *args: Any, **options: Any) -> Any:
        run = _run()
        given = signature.bind_partial(*args, **options).arguments
        is_nowhere = run is not None and given.get("run_id") == _NOWHERE
        if run is not None and is_nowhere and name == "get_run":
            return _run_nowhere(run)
        if not is_nowhere or name.startswith(_READS):
            return plain(*args, **options)
        if given.get("synchronous") is False:
            from mlflow.utils.async_logging.run_operations import RunOperations

            return RunOperations([])
        return given.get("value")


def _refused(client: Any, run_id: str, params: dict[str, Any]) -> set[str]:
    """The parameters that the driver's run has with other values: MLflow would raise an error."""
    run = _run()
    if not params or run is None or run_id != run.run_id:
        return set()
    existing = client.get_run(run_id).data.params
    refused = {
        name for name, value in params.items() if existing.get(name, str(value)) != str(value)
    }
    if refused:
        api.log_to_driver(
            "HorovodRunner: the MLflow run keeps its values of "
            f"{', '.join(sorted(refused))}; rank 0 logs other values of these parameters"
        )
    return refused
