"""Spark ML estimators that train as Horovod ranks, and the models that they return.

    from horovod_runner.ml import TorchEstimator

    model = TorchEstimator(np=4, model=Net(), optimizer=..., loss=..., epochs=5).fit(df)
    scored = model.transform(df)

The public name of :mod:`horovod_runner.integrations.spark_ml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_runner.ml.keras import KerasEstimator, KerasModel
    from horovod_runner.ml.lightning import LightningEstimator, LightningModel
    from horovod_runner.ml.torch import TorchEstimator, TorchModel

__all__ = [
    "KerasEstimator",
    "KerasModel",
    "LightningEstimator",
    "LightningModel",
    "TorchEstimator",
    "TorchModel",
]


def __getattr__(name: str) -> Any:
    # Each framework is imported only for its own classes.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    framework = name.removesuffix("Estimator").removesuffix("Model").lower()
    return getattr(import_module(f"{__name__}.{framework}"), name)
