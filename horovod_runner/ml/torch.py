"""The estimator and the model for PyTorch, where saved models name them.

The public name of :mod:`horovod_runner.integrations.spark_ml.torch`.
"""

from horovod_runner.integrations.spark_ml.torch import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
