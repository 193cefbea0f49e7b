"""Spark ML estimators that train as Horovod ranks, and the models that they return.

`params` has the Params, `estimator` and `model` what all frameworks share, `persistence` how they
are saved, and each framework has a file with its classes. Users import it as `horovod_runner.ml`.
Saved estimators and models carry that name.
"""
