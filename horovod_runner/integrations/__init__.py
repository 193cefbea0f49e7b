"""Foreign frameworks: what this package adds to each, and the names it has for each.

    keras             Horovod for Keras 3
    lightning         a strategy for Lightning
    huggingface       callbacks for the Trainer
    boosting          XGBoost and LightGBM between the ranks
    torch_backend     torch.distributed over Horovod's MPI
    compression       Compression.bf16 and Compression.powersgd of horovod.torch
    horovod_elastic   the states of hvd.elastic
    loops             `prepare`, `epochs` and `checkpointed` for loops of one's own
    training          the trainings of estimators: what they are, and how ranks run them
    spark_ml          estimators and models of Spark ML
    horovod_spark     the names of horovod.spark
    sparkdl           the names of Databricks' sparkdl

Users import them by their public names: ``horovod_runner.keras``, ``horovod_runner.ml`` and so on.
Kept empty: a rank imports only the framework that it uses.
"""
