"""Saves estimators and models, and loads them: alone, and as stages of a Pipeline.

    metadata/   one line of JSON, as Spark ML writes it: the class, and the Params that JSON has
    objects/    the other Params and the model, as rows of (name, part, data)

The metadata are written last and removed first: without them nothing is loaded.

Spark writes and reads both, on any filesystem that it knows and over Spark Connect. URLs that only
fsspec knows (``s3://``, ``gs://``) are read and written by fsspec.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import cloudpickle
import pyspark
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from horovod_runner.common.spark_session import current_python
from horovod_runner.errors import DataError, SerializationError
from horovod_runner.host.folders.urls import file_system
from horovod_runner.host.scratch import temporary_folder
from horovod_runner.launchers.sessions import find_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.data.scoring.models.kind import ModelKind

_PART_BYTES: Final = 32 << 20
_FSSPEC_SCHEMES: Final = ("s3", "gs", "gcs", "abfs", "az", "memory")
_SCHEMA: Final = "name string, part int, data binary"
_FOLDERS: Final = ("metadata", "objects")
_PARAMS: Final = "params"
_MODEL: Final = "model"


class Saveable(MLWritable, MLReadable):  # type: ignore[misc]
    """An estimator or a model that can be saved and loaded."""

    #: A function that reads the Param ``model`` from a file of its own; None pickles it with the
    #: other Params.
    _read_model: ClassVar[Any] = None
    #: Names of Params that are not saved: what they hold belongs to this session.
    _unsaved: ClassVar[tuple[str, ...]] = ()
    #: Names of attributes that are saved, beside the Params.
    _saved: ClassVar[tuple[str, ...]] = ()

    def write(self) -> SparkMLWriter:
        """A writer: ``write().overwrite().save(path)``."""
        return SparkMLWriter(self)

    @classmethod
    def read(cls) -> SparkMLReader:
        """A reader: ``read().load(path)``, or ``load(path)`` of the class."""
        return SparkMLReader(cls)

    def _kind(self) -> ModelKind:
        """The kind of the model, which writes it to a file."""
        raise NotImplementedError


class SparkMLWriter(MLWriter):  # type: ignore[misc]
    """Saves an estimator or a model."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Save to a folder or URL.

        Raises:
            SerializationError: a Param cannot be pickled.
            FileExistsError: there is something at the path, and ``overwrite()`` was not called.
        """
        store = store_of(path)
        if any(store.has(name) for name in _FOLDERS):
            if not self.shouldOverwrite:
                raise FileExistsError(
                    f"there is already something at {path}: write().overwrite().save(path) "
                    "replaces it"
                )
            store.remove()
        self.saveImpl(path)

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        """Save to a folder that does not exist."""
        instance, store = self._instance, store_of(path)
        plain, others = _divided(instance)
        kind = type(instance)
        metadata = {
            "class": _saved_name(kind),
            "timestamp": int(time.time() * 1000),
            "sparkVersion": pyspark.__version__,
            "uid": instance.uid,
            "paramMap": plain,
            "defaultParamMap": {},
        }
        with temporary_folder("save") as folder:
            files: dict[str, Path] = {}
            if kind._read_model is not None and others.pop(_MODEL, None) is not None:
                files[_MODEL] = Path(folder) / _MODEL
                instance._kind().write(instance.getOrDefault(_MODEL), files[_MODEL], ())
            try:
                kept = {name: getattr(instance, name) for name in kind._saved}
                pickled = cloudpickle.dumps((others, kept), protocol=5)
            except Exception as error:  # whatever the objects raise
                raise SerializationError(
                    f"a Param among {', '.join(others)} cannot be saved: {error}. Clear it before, "
                    "estimator.clear(estimator.callbacks), and set it after loading"
                ) from error
            files[_PARAMS] = Path(folder) / f"{_PARAMS}.pickle"
            files[_PARAMS].write_bytes(pickled)
            store.write(json.dumps(metadata), files)


class SparkMLReader(MLReader):  # type: ignore[misc]
    """Loads an estimator or a model of a class."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Load from a folder or URL. It unpickles what was saved: load only what you trust.

        Raises:
            DataError: something of another class was saved there, or saving was interrupted.
        """
        store = store_of(path)
        metadata = json.loads(store.read_metadata())
        kind = self._kind
        if metadata["class"] != _saved_name(kind):
            raise DataError(f"{path} must hold {kind.__qualname__}, got {metadata['class']}")
        instance = kind()
        instance._resetUid(metadata["uid"])
        with temporary_folder("load") as folder:
            store.read_files(Path(folder))
            others, kept = cloudpickle.loads((Path(folder) / _PARAMS).read_bytes())
            instance._set(**metadata["paramMap"], **others)
            if kind._read_model is not None and (Path(folder) / _MODEL).exists():
                instance._set(model=kind._read_model(Path(folder) / _MODEL))
        for name, value in kept.items():
            setattr(instance, name, value)
        return instance


def _saved_name(kind: type) -> str:
    """The name by which Spark finds a saved class."""
    module = kind.__module__.replace("horovod_runner.integrations.spark_ml", "horovod_runner.ml")
    return f"{module}.{kind.__qualname__}"


def _divided(instance: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Params that JSON has, and the others."""
    plain: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for param in instance.params:
        if instance.isSet(param) and param.name not in instance._unsaved:
            value = instance.getOrDefault(param)
            (plain if _is_plain(value) else others)[param.name] = value
    return plain, others


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def store_of(path: str) -> _SparkStore | _FsspecStore:
    """What reads and writes at a path."""
    scheme = path.partition("://")[0] if "://" in path else ""
    return _FsspecStore(path) if scheme in _FSSPEC_SCHEMES else _SparkStore(path)


class _SparkStore:
    """A folder on a filesystem that Spark knows."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spark = find_session()

    def has(self, name: str) -> bool:
        try:
            # Spark Connect looks for the path with the first action.
            self._spark.read.text(f"{self._path}/{name}").limit(0).collect()
        except Exception as error:  # pyspark's classes differ from release to release
            if "PATH_NOT_FOUND" in str(error):
                return False
            raise
        return True

    def remove(self) -> None:
        # Not removed, but incomplete: it is overwritten later.
        self._write_metadata([])

    def write(self, metadata: str, files: Mapping[str, Path]) -> None:
        mode = "overwrite"
        for name, path in files.items():
            for part, data in enumerate(_parts(path)):
                rows = self._rows([(name, part, data)], _SCHEMA)
                rows.write.mode(mode).parquet(f"{self._path}/objects")
                mode = "append"
        self._write_metadata([(metadata,)])

    def _write_metadata(self, lines: Sequence[tuple[str]]) -> None:
        rows = self._rows(lines, "value string")
        rows.write.mode("overwrite").text(f"{self._path}/metadata")

    def _rows(self, rows: Sequence[Any], schema: str) -> DataFrame:
        with current_python(self._spark):  # Spark pickles rows by a Python worker
            return self._spark.createDataFrame(rows, schema).coalesce(1)

    def read_metadata(self) -> str:
        row = self._spark.read.text(f"{self._path}/metadata").first()
        if row is None:
            raise DataError(
                f"{self._path} is incomplete: it was being overwritten, and that was interrupted. "
                "Save again with write().overwrite().save(path)"
            )
        return str(row[0])

    def read_files(self, folder: Path) -> None:
        objects = self._spark.read.schema(_SCHEMA).parquet(f"{self._path}/objects")
        counts = objects.select("name", "part").orderBy("name", "part").collect()
        for name, part in counts:
            row = objects.filter((objects.name == name) & (objects.part == part)).first()
            with (folder / name).open("ab") as file:
                file.write(bytes(row["data"]))


class _FsspecStore:
    """A folder at a URL of fsspec."""

    def __init__(self, path: str) -> None:
        self._filesystem, self._path = file_system(path)

    def has(self, name: str) -> bool:
        try:
            self._filesystem.info(f"{self._path}/{name}")  # exists() takes any error for False
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        for name in _FOLDERS:
            if self.has(name):
                self._filesystem.rm(f"{self._path}/{name}", recursive=True)

    def write(self, metadata: str, files: Mapping[str, Path]) -> None:
        for name in _FOLDERS:
            self._filesystem.makedirs(f"{self._path}/{name}", exist_ok=True)
        for name, path in files.items():
            self._filesystem.put_file(str(path), f"{self._path}/objects/{name}")
        self._filesystem.pipe_file(f"{self._path}/metadata/part-00000", metadata.encode())

    def read_metadata(self) -> str:
        return str(self._filesystem.cat_file(f"{self._path}/metadata/part-00000").decode())

    def read_files(self, folder: Path) -> None:
        for path in self._filesystem.ls(f"{self._path}/objects", detail=False):
            self._filesystem.get_file(path, str(folder / path.rpartition("/")[2]))


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_PART_BYTES):
            yield data
