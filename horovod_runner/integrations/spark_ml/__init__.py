"""Spark ML estimators that train as Horovod ranks, and the models that they return.

`params` has the Params, `estimator` and `model` what all frameworks share, `persistence` how they
are saved, and each framework has a file with its classes. Users import it as `horovod_runner.ml`.
Saved estimators and models carry that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_runner.integrations.spark_ml.keras import KerasEstimator, KerasModel
    from horovod_runner.integrations.spark_ml.lightning import LightningEstimator, LightningModel
    from horovod_runner.integrations.spark_ml.torch import TorchEstimator, TorchModel

__all__ = [
    "KerasEstimator",
    "KerasModel",
    "LightningEstimator",
    "LightningModel",
    "TorchEstimator",
    "TorchModel",
]


def __getattr__(name: str) -> Any:
    # Lazily: each framework is imported only for its own classes.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    framework = name.removesuffix("Estimator").removesuffix("Model").lower()
    value = getattr(import_module(f"{__name__}.{framework}"), name)
    globals()[name] = value
    return value
