"""Models that were logged to MLflow: of torch and Keras as such, others through pyfunc."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from horovod_runner.common.files import unpack
from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.kind import Call, Parts
from horovod_runner.errors import PredictionError

_FOLDER: Final = "model"


@dataclass(frozen=True)
class PyfuncKind:
    """A model of MLflow that is neither torch nor Keras; its file is the logged folder."""

    framework: Framework = "numpy"

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Put the logged folder into one file."""
        with tarfile.open(path, "x", dereference=True) as tar:  # links may lead out of the folder
            tar.add(model, _FOLDER)

    def load(self, path: Path, device: str) -> Call:
        """Load the model with ``mlflow.pyfunc``."""
        import mlflow.pyfunc

        with tempfile.TemporaryDirectory() as folder:
            unpack(path, Path(folder))
            model = mlflow.pyfunc.load_model(str(Path(folder) / _FOLDER))
        signature = model.metadata.signature
        takes_tensor = signature is not None and signature.inputs.is_tensor_spec()

        def call(parts: Parts) -> Any:
            if takes_tensor:
                return model.predict(_alone(parts))
            import pandas

            table = {
                name: list(value) if np.ndim(value) > 1 else value for name, value in parts.items()
            }
            return model.predict(pandas.DataFrame(table))

        return call


def _alone(parts: Parts) -> Any:
    return next(iter(parts.values())) if len(parts) == 1 else dict(parts)


def load_logged(model: Any) -> Any:
    """Load a logged model: a module of torch, a Keras model, or the folder of another flavour.

    It is named by its URI, or by what ``log_model`` or ``mlflow.pyfunc.load_model`` returned.

    Raises:
        PredictionError: it cannot be loaded.
        TypeError: it is no model.
    """
    uri = model if isinstance(model, str) else getattr(model, "model_uri", None)
    if uri is None and hasattr(model, "metadata"):  # a PyFuncModel
        uri = model.metadata.get_model_info().model_uri
    if not isinstance(uri, str):
        raise TypeError(f"predict requires a model of MLflow or its URI, not {model!r}")
    try:
        import mlflow
    except ImportError as error:
        raise PredictionError(
            f"the model {uri!r} is a URI of MLflow, which is not installed here ({error}): "
            "pip install mlflow"
        ) from error
    try:
        flavors = mlflow.models.get_model_info(uri).flavors
        if "pytorch" in flavors:
            import mlflow.pytorch

            return mlflow.pytorch.load_model(uri, map_location="cpu")
        for flavor in ("keras", "tensorflow"):
            if flavor in flavors:
                return import_module(f"mlflow.{flavor}").load_model(uri)
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=uri))
    except (mlflow.MlflowException, OSError) as error:
        raise PredictionError(f"MLflow cannot load the model {uri!r}: {error}") from error
