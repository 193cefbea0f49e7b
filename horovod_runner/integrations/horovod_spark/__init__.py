"""Lets code that was written for ``horovod.spark`` run with this package instead.

    import horovod_runner.horovod_spark

    horovod_runner.horovod_spark.install()
    import horovod.spark
    from horovod.spark.torch import TorchEstimator
    from horovod.spark.common.store import Store

`names` says which module replaces which of Horovod's. `launch` has ``run``, `backend` and
`store` what estimators are given, `estimator` and `model` what all frameworks share, and
`frameworks` the estimators and models themselves. They describe a training to
`integrations.training`, and `stored_run` runs it where the backend says. May import `spark_ml`,
`training` and what these may import.
"""

from __future__ import annotations

from horovod_runner.integrations.horovod_spark.names import install, install_where_missing

__all__ = ["install", "install_where_missing"]
