"""The estimator and the model for Keras, where saved models name them.

The public name of :mod:`horovod_runner.integrations.spark_ml.keras`.
"""

from horovod_runner.integrations.spark_ml.keras import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
