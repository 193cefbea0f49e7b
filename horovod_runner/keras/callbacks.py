"""All Keras callbacks of this package.

The public name of :mod:`horovod_runner.integrations.keras.callbacks`.
"""

from horovod_runner.integrations.keras.callbacks import *  # noqa: F403 - its __all__
