"""The import hooks of a run: which module of a framework is changed in a rank, and by which room.

The table travels in the job. The functions are imported in the rank, with the framework. A name
that begins with a dot is in this package.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from horovod_runner.wire.job_file import ImportHook

_ADASUM_ALLOWED: Final = "op=Adasum is not refused without MPI, and fails later"
_UNEQUAL: Final = "a feed with global_batch gives unequal parts to a model with batch normalization"
_DEVICES: Final = "Lightning's own strategies need devices= and num_nodes="
_FIT: Final = (
    "model.fit takes no feed of to_torch, counts the padding of a validation, and averages metrics "
    "only for the callbacks after MetricAverageCallback"
)
_MLFLOW: Final = "what ranks log to MLflow makes runs of its own beside the driver's"
_BARE_CHILDREN: Final = (
    "processes that a rank starts anew (spawn, forkserver) lack the classes and functions of the "
    "notebook or script"
)

_vital: Final = partial(ImportHook, trains=True)
_in_ranks: Final = partial(ImportHook, only_ranks=True)
_keras_3: Final = partial(ImportHook, sign="ops")

IMPORT_HOOKS: Final = (
    ImportHook(
        "accelerate.state",
        ".integrations.torch_backend:patch_accelerate",
        'Accelerate takes gloo on CPUs, not the backend "hvd"',
    ),
    _in_ranks(
        "getpass",
        ".worker.interpreter.debuggers:explain_getpass",
        "getpass() ends with an error that does not name the rank",
    ),
    ImportHook(
        "hdfs_native.fsspec",
        ".host.folders.hdfs:keep_in_children",
        "processes that a rank forks after it has used HDFS wait for ever",
    ),
    _vital(
        "horovod",
        ".integrations.keras.distributed.horovod_modules:replace",
        "horovod.keras and horovod.tensorflow.keras average no gradients on Keras 3",
        only_ranks=True,
    ),
    ImportHook(
        "horovod.common.elastic",
        ".integrations.horovod_elastic:patch",
        "the states of hvd.elastic are lost when the ranks change",
    ),
    _vital(
        "horovod.tensorflow",
        ".integrations.keras.distributed.horovod_modules:patch_tensorflow",
        "horovod.tensorflow does not know the variables and optimizers of Keras 3",
    ),
    ImportHook(
        "horovod.tensorflow.elastic",
        ".integrations.keras.distributed.horovod_modules:patch_elastic",
        "TensorFlowKerasState does not know the models of Keras 3",
    ),
    ImportHook(
        "horovod.tensorflow.keras",
        ".integrations.keras.distributed.horovod_modules:patch_legacy",
        "horovod.tensorflow.keras mixes up Keras 2 and Keras 3",
    ),
    ImportHook(
        "horovod.tensorflow.keras.callbacks",
        ".integrations.keras.distributed.horovod_modules:patch_legacy",
        "the callbacks of horovod.tensorflow.keras mix up Keras 2 and Keras 3",
    ),
    ImportHook(
        "horovod.tensorflow.mpi_ops", ".worker.checks.adasum:refuse_without_mpi", _ADASUM_ALLOWED
    ),
    ImportHook(
        "horovod.tensorflow.sync_batch_norm",
        ".integrations.keras.distributed.horovod_modules:patch_sync_batch_norm",
        "hvd.SyncBatchNormalization does not work on Keras 3",
    ),
    ImportHook(
        "horovod.tensorflow.util",
        ".integrations.keras.distributed.horovod_modules:patch_util",
        "TensorFlow translates Horovod's functions, which takes seconds at the first step",
    ),
    ImportHook(
        "horovod.torch.compression",
        ".integrations.compression:offer",
        "Compression.bf16 and Compression.powersgd are missing",
    ),
    _vital(
        "horovod.torch.functions",
        ".worker.checks.optimizer_state:mend",
        "hvd.broadcast_optimizer_state changes weights",
    ),
    ImportHook(
        "horovod.torch.mpi_ops", ".worker.checks.adasum:refuse_without_mpi", _ADASUM_ALLOWED
    ),
    ImportHook(
        "horovod.torch.mpi_ops",
        ".worker.checks.nccl:refuse_without",
        "a Horovod without NCCL aborts a rank that reduces a tensor on a GPU",
    ),
    ImportHook(
        "horovod.torch.mpi_ops",
        ".worker.checks.steps:watch_join",
        "ranks that called hvd.join() seem to have other weights at the end",
    ),
    _vital(
        "horovod.torch.optimizer",
        ".worker.checks.optimizers:mend",
        "hvd.DistributedOptimizer moves weights that no rank has a gradient for, and averages no "
        "gradients of weights that are added later",
    ),
    _vital(
        "horovod.torch.optimizer",
        ".worker.checks.gradients:mend_horovod",
        "gradients are clipped and unscaled before they are averaged",
    ),
    ImportHook(
        "horovod.torch.optimizer",
        ".integrations.compression.whole:patch_optimizer",
        "hvd.DistributedOptimizer does not know Compression.powersgd",
    ),
    _keras_3(
        "keras.src.backend.tensorflow.trainer",
        ".integrations.keras.fitting.patch:patch",
        _FIT,
    ),
    _keras_3(
        "keras.src.backend.torch.trainer",
        ".integrations.keras.fitting.patch:patch",
        _FIT,
    ),
    _keras_3(
        "keras.src.callbacks.callback_list",
        ".worker.checks.steps:watch_keras",
        "model.fit does not compare the ranks' weights",
    ),
    _keras_3(
        "keras.src.callbacks.csv_logger",
        ".worker.checks.calls:watch_keras_csv",
        "a CSVLogger on several ranks is not noticed",
    ),
    _keras_3(
        "keras.src.callbacks.tensorboard",
        ".worker.checks.calls:watch_keras_logs",
        "TensorBoard on several ranks is not noticed",
    ),
    _vital(
        "keras.src.layers.normalization.batch_normalization",
        ".worker.checks.batch_norms:watch_keras",
        _UNEQUAL,
        sign="ops",
    ),
    _keras_3(
        "keras.src.saving.saving_api",
        ".worker.checks.calls:watch_keras_save",
        "models that several ranks save are not noticed",
    ),
    ImportHook("lightning.pytorch.loggers.mlflow", ".worker.mlflow_run:patch_logger", _MLFLOW),
    ImportHook(
        "lightning.pytorch.trainer.trainer", ".integrations.lightning_ranks:patch_trainer", _DEVICES
    ),
    ImportHook("mlflow.tracking.fluent", ".worker.mlflow_run:patch_fluent", _MLFLOW),
    _in_ranks(
        "multiprocess.spawn",
        ".worker.interpreter.children:give_to_children",
        _BARE_CHILDREN,
    ),
    _in_ranks(
        "multiprocessing.spawn",
        ".worker.interpreter.children:give_to_children",
        _BARE_CHILDREN,
    ),
    _in_ranks(
        "pdb",
        ".worker.interpreter.debuggers:explain_pdb",
        "debuggers end with BdbQuit, because a rank has no terminal",
    ),
    ImportHook(
        "pyspark.core.context|pyspark.context",
        ".worker.checks.calls:watch_spark",
        "a Spark session that a rank starts is not noticed",
        sign="SparkContext",
    ),
    ImportHook("pytorch_lightning.loggers.mlflow", ".worker.mlflow_run:patch_logger", _MLFLOW),
    ImportHook(
        "pytorch_lightning.trainer.trainer", ".integrations.lightning_ranks:patch_trainer", _DEVICES
    ),
    _in_ranks(
        "tensorflow",
        ".host.gpus:pin_tensorflow_here",
        "ranks of a host use the same GPU with TensorFlow, unless main calls set_visible_devices",
    ),
    _in_ranks(
        "torch",
        ".host.gpus:pin_torch_here",
        "ranks of a host use the same GPU with torch, unless main calls torch.cuda.set_device",
    ),
    ImportHook(
        "torch.distributed.distributed_c10d",
        ".integrations.torch_backend:register",
        'torch.distributed has no backend "hvd"',
    ),
    _vital(
        "torch.amp.grad_scaler",
        ".worker.checks.gradients:mend_scaling",
        "GradScaler unscales gradients before they are averaged",
    ),
    _vital(
        "torch.nn.modules.batchnorm",
        ".worker.checks.batch_norms:watch_torch",
        _UNEQUAL,
    ),
    ImportHook(
        "torch.nn.parallel.distributed",
        ".worker.checks.steps:watch_data_parallel",
        "DistributedDataParallel's weights are not compared",
    ),
    _vital(
        "torch.nn.utils.clip_grad",
        ".worker.checks.gradients:mend_clipping",
        "clip_grad_norm_ and clip_grad_value_ clip gradients before they are averaged",
    ),
    ImportHook(
        "torch.optim.optimizer",
        ".worker.profiling.steps:optimizer_steps.watch",
        "the steps of optimizers are not counted",
    ),
    ImportHook(
        "torch.optim.optimizer",
        ".worker.checks.steps:watch_torch",
        "the ranks' weights are not compared",
    ),
    ImportHook(
        "torch.serialization",
        ".worker.checks.calls:watch_torch_save",
        "files that several ranks save are not noticed",
    ),
    _in_ranks(
        "torch.utils.data.dataloader",
        ".worker.profiling.loader:loaders.watch",
        "the time that a rank waits for a DataLoader is not measured",
    ),
    ImportHook(
        "torch.utils.data.distributed",
        ".worker.checks.calls:watch_sampler",
        "a DistributedSampler without set_epoch is not noticed",
    ),
    ImportHook(
        "torch.utils.tensorboard.writer",
        ".worker.checks.calls:watch_torch_logs",
        "a SummaryWriter on several ranks is not noticed",
    ),
    ImportHook(
        "transformers.trainer",
        ".integrations.huggingface:patch_trainer",
        "the Trainer needs to_torch_dataset(whole=True), and for a classifier "
        "average_tokens_across_devices=False",
    ),
    ImportHook(
        "transformers.training_args",
        ".integrations.huggingface:patch_arguments",
        "without GPUs the Trainer needs TrainingArguments(use_cpu=True)",
    ),
)
