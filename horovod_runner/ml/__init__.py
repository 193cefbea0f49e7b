"""Spark ML estimators that train as Horovod ranks, and the models that they return.

    from horovod_runner.ml import TorchEstimator

    model = TorchEstimator(np=4, model=Net(), optimizer=..., loss=..., epochs=5).fit(df)
    scored = model.transform(df)

The public name of :mod:`horovod_runner.integrations.spark_ml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod_runner.integrations import spark_ml as _spark_ml

if TYPE_CHECKING:
    from horovod_runner.integrations.spark_ml import *  # noqa: F403

__all__ = _spark_ml.__all__


def __getattr__(name: str) -> Any:
    return getattr(_spark_ml, name)  # each framework is imported only for its own classes
