"""A model's way to Spark's Python workers: one file, that reaches each host once.

    model --write--> file named by its content --+-- below 1 MiB: inside the function
                                                 +-- local[n]: its path
                                                 +-- otherwise: SparkContext.addFile, or an artifact

A worker keeps the models that it loaded last, for the partitions to come.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from horovod_runner.common.files import file_sha256
from horovod_runner.common.spark_session import is_on_this_machine, spark_context
from horovod_runner.data.place import process_folder
from horovod_runner.data.scoring.models.kind import Call, ModelKind
from horovod_runner.errors import SerializationError
from horovod_runner.host.gpus import visible_gpus
from horovod_runner.host.scratch import temporary_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SMALL_BYTES: Final = 1 << 20
_MOST_LOADED: Final = 2

_loaded: OrderedDict[tuple[str, str], Call] = OrderedDict()
_loading = threading.Lock()


@dataclass(frozen=True)
class ModelFile:
    """A model in a file; pickled to Spark's Python workers."""

    kind: ModelKind
    name: str  # of the file; identifies its content
    data: bytes = b""  # of a small file; otherwise empty
    path: str = ""  # where Spark's tasks run on the driver's machine; otherwise empty

    def load(self, device: str) -> Call:
        """The model, loaded once in this process for each device."""
        key = (self.name, device)
        with _loading:
            if key in _loaded:
                _loaded.move_to_end(key)
                return _loaded[key]
            while len(_loaded) >= _MOST_LOADED:
                _loaded.popitem(last=False)
            _loaded[key] = self._read(device)
            return _loaded[key]

    def _read(self, device: str) -> Call:
        if self.data:
            with temporary_folder("model") as folder:
                path = Path(folder) / self.name
                path.write_bytes(self.data)
                return self.kind.load(path, device)
        if self.path:
            return self.kind.load(Path(self.path), device)
        from pyspark import SparkFiles

        return self.kind.load(Path(SparkFiles.get(self.name)), device)


def keep(kind: ModelKind, model: Any, ship_modules: Sequence[ModuleType]) -> Path:
    """Write a model to a file of this process, named by its content."""
    folder = _folder()
    draft = folder / f"part-{uuid4().hex}"
    try:
        kind.write(model, draft, ship_modules)
    except Exception as error:  # whatever the framework, cloudpickle or the user's classes raise
        draft.unlink(missing_ok=True)
        raise SerializationError(
            f"the model ({type(model).__name__}) cannot be written to a file, as which it reaches "
            f"Spark's executors: {type(error).__name__}: {error}. Remove what only this process "
            "has (open files, locks, sessions) from it, or pass a function that loads the model"
        ) from error
    path = folder / f"model-{file_sha256(draft)[:32]}"
    draft.rename(path)
    return path


def ship(kind: ModelKind, path: Path, spark: SparkSession) -> ModelFile:
    """Make a model's file available to the executors of a session."""
    name = path.name
    if path.stat().st_size < _SMALL_BYTES:
        return ModelFile(kind, name, data=path.read_bytes())
    context = spark_context(spark)
    if context is None:
        spark.addArtifact(str(path), file=True)
        return ModelFile(kind, name)
    if is_on_this_machine(spark):
        return ModelFile(kind, name, path=str(path))
    context.addFile(str(path))
    return ModelFile(kind, name)


@cache
def _folder() -> Path:
    """This process's folder of model files."""
    return process_folder(f"models-{os.getpid()}-{uuid4().hex[:8]}")


def task_device() -> str:
    """The device of this Spark task: its GPU, or the CPU."""
    from pyspark import TaskContext

    context = TaskContext.get()
    gpu = None if context is None else context.resources().get("gpu")
    if gpu is None or not gpu.addresses:
        return "cpu"
    visible = visible_gpus()
    address = str(gpu.addresses[0])
    return f"cuda:{visible.index(address) if address in visible else 0}"
