"""Replaces and patches modules of Horovod's in a rank: for Keras 3, torch, and elastic runs.

On Keras 3, ``horovod.keras`` and ``horovod.tensorflow.keras`` train without averaging gradients,
and say nothing. An import of them gives :mod:`horovod_runner.keras` instead, and prints a line.
``horovod.tensorflow`` stays, except what does not know Keras 3's variables. Where
``tf.keras`` is Keras 2 (TF_USE_LEGACY_KERAS), Horovod's own modules work, and stay except for one
import.

``horovod.common.elastic`` is patched: a state comes back from the commits of the run. So is
``broadcast_optimizer_state`` of ``horovod.torch``, which would change weights. Its ``Compression``
gets bfloat16 and PowerSGD. Adasum is refused where there is no MPI. torch.distributed gets the
backend "hvd". Modules of torch, Keras and Spark are patched where a mistake in training code shows
(`checks`). TensorFlow's AutoGraph is kept off ``horovod.tensorflow``, which needs none.

While a framework is imported, Python collects no garbage: the objects that an import makes stay,
and looking through them again and again takes an eighth of its time.

Every worker imports this module. What the replacements need is imported only when they are used.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

from horovod_runner.common.replacements import ReplacementLoader
from horovod_runner.profiling.steps import optimizer_steps
from horovod_runner.worker.api import current_rank, log_to_driver

if TYPE_CHECKING:
    from importlib.abc import Loader

_KERAS = ("horovod.keras", "horovod.tensorflow.keras")
_PATCH_OF_TENSORFLOW = "horovod_runner.keras.distributed.horovod_tensorflow"
# Their imports make a hundred thousand objects and more.
_LARGE = frozenset(
    {
        "keras",
        "lightning",
        "pytorch_lightning",
        "tensorflow",
        "torch",
        "torch._dynamo",
        "transformers",
        "transformers.trainer",
    }
)


def keras_on_import() -> None:
    """Install the replacements for the imports of this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import finder for ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _PATCHES:
            return _patched_spec(_PATCHES[fullname], fullname, path, target)
        if fullname in _LARGE:
            return _spec(_UncollectedLoader, fullname, path, target)
        if not fullname.startswith("horovod."):
            return None
        for name in _KERAS:
            if fullname == name or fullname.startswith(f"{name}."):
                if not _is_keras_3(name):
                    return _patched_spec(_patch_legacy, fullname, path, target)
                replacement = f"horovod_runner.keras{fullname.removeprefix(name)}"
                loader: Any = _ReplacingLoader(replacement)
                return ModuleSpec(fullname, loader, is_package=fullname == name)
        return None


class _ReplacingLoader(ReplacementLoader):
    """Loads a module that has the contents of another one, and says so."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _announce(module.__name__)


class _OwnLoader:
    """Loads a module with its own loader, as the classes below it do with something added.

    Args:
        loader: the module's own.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # what a reader of a spec may ask of its loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)


class _PatchingLoader(_OwnLoader):
    """Patches the loaded module.

    Args:
        loader: the module's own.
        patch: called with the loaded module.
    """

    def __init__(self, loader: Loader, patch: Callable[[Any], None]) -> None:
        super().__init__(loader)
        self._patch = patch

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._patch(module)


class _UncollectedLoader(_OwnLoader):
    """Lets Python collect no garbage meanwhile, and never search what the first import has made.

    It would search that in each full collection, and twice when the rank ends: for 1 to 2 seconds.
    Later imports may come when there are a model and data, which are to be freed at some time.
    Keras mostly follows the import of its backend.
    """

    def exec_module(self, module: ModuleType) -> None:
        collects = gc.isenabled()
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            if collects:
                if not gc.get_freeze_count() or module.__name__ == "keras":
                    gc.freeze()
                gc.enable()


def _patched_spec(
    patch: Callable[[Any], None], name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    return _spec(lambda loader: _PatchingLoader(loader, patch), name, path, target)


def _spec(
    wrap: Callable[[Loader], Any],
    name: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder):
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = wrap(spec.loader)
                return spec
    return None


def _is_keras_3(name: str) -> bool:
    """Whether a module of Horovod's would use Keras 3."""
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    if legacy and name == "horovod.tensorflow.keras":
        return False  # it uses tf.keras
    from importlib import metadata

    try:
        return int(metadata.version("keras").partition(".")[0]) >= 3
    except (metadata.PackageNotFoundError, ValueError):
        return False


@cache
def _announce(name: str) -> None:
    if current_rank() == 0 and name in _KERAS:
        from importlib import metadata

        log_to_driver(
            f"HorovodRunner: {name} does not average gradients on Keras "
            f"{metadata.version('keras')}: horovod_runner.keras takes its place. To make this line "
            "go away: import horovod_runner.keras as hvd, and use its DistributedOptimizer"
        )


def _patch_legacy(module: Any) -> None:
    """Make Horovod's functions use the Keras of its classes.

    It uses ``tf.keras`` for its classes, and the package ``keras`` for its functions.
    """
    keras = getattr(module, "keras", None)
    if hasattr(module, "K") and keras is not None:
        module.K = keras.backend


def _patch_tensorflow(hvd: Any) -> None:
    """Make functions accept Keras 3's variables and optimizers."""
    if _is_keras_3("horovod.tensorflow.keras"):
        # By its name: it is in a layer above this one.
        import_module(_PATCH_OF_TENSORFLOW).patch(hvd)


def _patch_tensorflow_util(util: Any) -> None:
    """Keep AutoGraph off Horovod's functions: to translate them takes most of a first step.

    They were written for graphs without it, and have no conditions on tensors.
    """
    tf = util.tf
    util._make_subgraph = lambda function: tf.function(function, autograph=False)
    # For a tf.function of the user's. TensorFlow has such rules for Keras and other packages.
    with suppress(ImportError, AttributeError):
        config: Any = import_module("tensorflow.python.autograph.core.config")
        rules = map(config.DoNotConvert, ("horovod.tensorflow", _PATCH_OF_TENSORFLOW))
        config.CONVERSION_RULES = (*config.CONVERSION_RULES, *rules)


def _patch_sync_batch_norm(module: Any) -> None:
    """Put a layer of Keras 3 in the place of one that was written for Keras 2."""
    if _is_keras_3("horovod.tensorflow.keras"):
        batch_norm = import_module("horovod_runner.keras.distributed.batch_norm")
        module.SyncBatchNormalization = batch_norm.SyncBatchNormalization


def _patch_elastic(elastic: Any) -> None:
    # By its name: it is in a layer above this one.
    import_module("horovod_runner.elastic.horovod_states").patch(elastic)


def _patch_tensorflow_elastic(elastic: Any) -> None:
    """Make ``TensorFlowKerasState`` accept models and optimizers of Keras 3."""
    if not _is_keras_3("horovod.tensorflow.keras"):
        return

    def of_keras(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Not before it is used: it imports Keras.
            return getattr(import_module("horovod_runner.keras.elastic"), name)(*args, **kwargs)

        return call

    elastic.TensorFlowKerasState._save_model = of_keras("save_model")
    elastic.TensorFlowKerasState._load_model = of_keras("load_model")
    elastic._broadcast_model = of_keras("broadcast_model")


def _patch_mpi_ops(ops: Any) -> None:
    """Refuse Adasum at once where Horovod has none: in runs without MPI."""
    for name in (
        "_allreduce",
        "_grouped_allreduce",
        "_allreduce_async",
        "_grouped_allreduce_async",
    ):
        if hasattr(ops, name):
            setattr(ops, name, _without_adasum(ops, getattr(ops, name)))


def _patch_torch_mpi_ops(ops: Any) -> None:
    _patch_mpi_ops(ops)
    _check("steps", "watch_join")(ops)


def _without_adasum(ops: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    position = list(signature(function).parameters).index("op")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        op = args[position] if len(args) > position else kwargs.get("op")
        if op == ops.Adasum and not ops.mpi_enabled():
            raise ValueError(
                "op=Adasum needs MPI, and Horovod's controller is Gloo in this run. Install MPI "
                '(docs/concepts/collectives.md) and set ClusterConfig(cpu_collectives="mpi"), or '
                "use op=Average"
            )
        return function(*args, **kwargs)

    return call


def _patch_torch_compression(module: Any) -> None:
    # By their names: they import torch and Horovod.
    module.Compression.bf16 = import_module("horovod_runner.compression.bfloat16").BFloat16
    module.Compression.powersgd = import_module("horovod_runner.compression.powersgd").PowerSGD


def _patch_torch_optimizer(module: Any) -> None:
    import_module("horovod_runner.worker.checks.optimizers").mend(module)
    import_module("horovod_runner.worker.checks.gradients").watch_horovod(module)
    import_module("horovod_runner.compression.whole").patch_optimizer(module)


def _patch_c10d(c10d: Any) -> None:
    """Give torch.distributed the backend "hvd"."""
    # By its name: it is in a layer above this one.
    import_module("horovod_runner.torch_backend").register(c10d)


def _patch_accelerate(state: Any) -> None:
    import_module("horovod_runner.torch_backend").patch_accelerate(state)


def _check(module: str, watch: str) -> Callable[[Any], None]:
    """A patch that calls a function of the package `checks`, which is imported only then."""

    def patch(patched: Any) -> None:
        getattr(import_module(f"horovod_runner.worker.checks.{module}"), watch)(patched)

    return patch


def _watch_optimizers(module: Any) -> None:
    optimizer_steps.watch(module)
    _check("steps", "watch_torch")(module)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "accelerate.state": _patch_accelerate,
    "horovod.common.elastic": _patch_elastic,
    "horovod.tensorflow": _patch_tensorflow,
    "horovod.tensorflow.elastic": _patch_tensorflow_elastic,
    "horovod.tensorflow.sync_batch_norm": _patch_sync_batch_norm,
    "horovod.tensorflow.mpi_ops": _patch_mpi_ops,
    "horovod.tensorflow.util": _patch_tensorflow_util,
    "horovod.torch.compression": _patch_torch_compression,
    "horovod.torch.functions": _check("optimizer_state", "mend"),
    "horovod.torch.mpi_ops": _patch_torch_mpi_ops,
    "horovod.torch.optimizer": _patch_torch_optimizer,
    "keras.src.callbacks.callback_list": _check("steps", "watch_keras"),
    "keras.src.callbacks.csv_logger": _check("calls", "watch_keras_csv"),
    "keras.src.callbacks.tensorboard": _check("calls", "watch_keras_logs"),
    "keras.src.layers.normalization.batch_normalization": _check("batch_norms", "watch_keras"),
    "keras.src.saving.saving_api": _check("calls", "watch_keras_save"),
    "mlflow.tracking.fluent": _check("calls", "watch_mlflow"),
    "pyspark.context": _check("calls", "watch_spark"),
    "pyspark.core.context": _check("calls", "watch_spark"),
    "torch.distributed.distributed_c10d": _patch_c10d,
    "torch.amp.grad_scaler": _check("gradients", "watch_scaling"),
    "torch.nn.modules.batchnorm": _check("batch_norms", "watch_torch"),
    "torch.nn.parallel.distributed": _check("steps", "watch_data_parallel"),
    "torch.nn.utils.clip_grad": _check("gradients", "watch_clipping"),
    "torch.optim.optimizer": _watch_optimizers,
    "torch.serialization": _check("calls", "watch_torch_save"),
    "torch.utils.data.distributed": _check("calls", "watch_sampler"),
    "torch.utils.tensorboard.writer": _check("calls", "watch_torch_logs"),
}
