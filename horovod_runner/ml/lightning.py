"""The estimator and the model for Lightning, where saved models name them.

The public name of :mod:`horovod_runner.integrations.spark_ml.lightning`.
"""

from horovod_runner.integrations.spark_ml.lightning import LightningEstimator, LightningModel

__all__ = ["LightningEstimator", "LightningModel"]
