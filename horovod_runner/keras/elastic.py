"""Horovod Elastic for Keras 3.

The public name of :mod:`horovod_runner.integrations.keras.elastic`.
"""

from horovod_runner.integrations.keras.elastic import *  # noqa: F403 - its __all__
