"""What a user can give as a dataset, and how it is made ready on the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from horovod_runner.data import columns, files
from horovod_runner.data.readers import ArrowReader, Deferred, Reader, Table, TableFile, named
from horovod_runner.data.spill import Spilled
from horovod_runner.errors import DataError
from horovod_runner.folder import check_room

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.data.files import Filter


Prepared: TypeAlias = Reader | Deferred


class Source(ABC):
    """A dataset by its description; nothing is read before a run needs it."""

    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """Look at the data.

        Args:
            name: what the user calls it, for messages.
            shared: a folder that this process and all ranks see; None where there is none.

        Raises:
            DataError: it cannot be read, or a column cannot become a tensor.
        """
        with named(name):
            return self._prepare(name, shared)

    @abstractmethod
    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        """See :meth:`prepare`, which puts the name before what is wrong."""


def _reading(
    columns: Sequence[str] | None,
    filter_: Filter | None,
    fill: Mapping[str, Any] | None,
    ragged: Sequence[str],
    storage_options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """How Parquet files are read, whoever lists them: arguments of :func:`files.find`."""
    return {
        "columns": columns,
        "filter_": filter_,
        "fill": fill,
        "ragged": ragged,
        "storage_options": storage_options,
    }


class parquet(Source):  # noqa: N801 - reads as a call
    """Parquet files, which the ranks read themselves.

    Args:
        path: a file, a folder (hive partitions become columns), a glob pattern, or several of
            these; on anything that fsspec knows: ``s3://``, ``hdfs://``, ``gs://``, ``abfs://``.
        columns: which are read; None for all.
        filter: which rows are read: an expression of ``pyarrow.dataset``, or tuples as pyarrow
            takes them: ``[("year", ">=", 2024)]``.
        fill: what stands for nulls, by column.
        ragged: lists that are no vectors, though the first of them may be as long as each other.
        storage_options: for fsspec.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        fill: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._options = _reading(columns, filter, fill, ragged, storage_options)

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        return _checked(files.find(self._path, **self._options))


class delta(Source):  # noqa: N801 - reads as a call
    """A Delta table, which the ranks read themselves; takes deltalake.

    Deleted rows and renamed columns are taken into account. The version is settled when the run
    begins: what is written meanwhile is not seen.

    Args:
        path: the table's folder or URL.
        version: of the table; None for the newest.
        columns: see :class:`parquet`.
        filter: see :class:`parquet`.
        fill: see :class:`parquet`.
        ragged: see :class:`parquet`.
        storage_options: for deltalake and for fsspec.
    """

    def __init__(
        self,
        path: str,
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        fill: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path
        self._version = version
        self._options = _reading(columns, filter, fill, ragged, storage_options)

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        from horovod_runner.data import delta_table

        return _checked(delta_table.find(self._path, version=self._version, **self._options))


class petastorm(Source):  # noqa: N801 - reads as a call
    """A dataset of Petastorm's: of ``materialize_dataset`` or of ``make_spark_converter``.

    Its files are read without Petastorm, cells of its codecs decoded. Images whose size the
    Unischema states are decoded when they are packed; others stay encoded, see ``images`` of
    :meth:`Shard.batches`. Predicates, ngrams and transforms are Petastorm's to apply: it is needed
    for them, and each host reads the whole dataset with it once.

    Args:
        dataset: its URL, or what ``make_spark_converter`` returned.
        columns: see :class:`parquet`.
        filter: see :class:`parquet`; not together with the three below.
        predicate: of ``petastorm.predicates``.
        ngram: a ``petastorm.ngram.NGram``; its columns are called "0.name", "1.name", ... by their
            distance in time.
        transform_spec: of ``petastorm.transform``.
        fill: see :class:`parquet`.
        ragged: see :class:`parquet`.
        storage_options: for fsspec, and for Petastorm.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        predicate: Any = None,
        ngram: Any = None,
        transform_spec: Any = None,
        fill: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._url: str = dataset if isinstance(dataset, str) else dataset.cache_dir_url
        self._plain = _reading(columns, filter, fill, ragged, storage_options)
        own = {"predicate": predicate, "transform_spec": transform_spec, "schema_fields": ngram}
        self._own = {name: value for name, value in own.items() if value is not None}
        if self._own and filter is not None:
            raise ValueError(
                "filter is for what is read without Petastorm, and predicate, ngram and "
                "transform_spec for what is read with it: give one or the other"
            )
        if self._own and fill:
            raise ValueError("fill takes no part in what Petastorm reads: use transform_spec")
        if ngram is not None and columns is not None:
            raise ValueError("an ngram names its columns itself: leave columns out")

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        import fsspec

        from horovod_runner.data import petastorm_format, petastorm_reader

        options = self._plain["storage_options"]
        filesystem, folder = fsspec.core.url_to_fs(self._url, **(options or {}))
        cells = petastorm_format.cells_of(filesystem, folder)
        if self._own:
            plain = files.find(self._url, storage_options=options)
            asked = {"schema_fields": self._plain["columns"], "storage_options": options}
            given = {key: value for key, value in asked.items() if value is not None}
            return petastorm_reader.look(
                name,
                self._url,
                {**given, **self._own},
                has_unischema=cells is not None,
                groups=sum(len(groups) for part in plain.parts for _, groups in part),
            )
        found = files.find(self._url, **self._plain)
        return _checked(found if cells is None else petastorm_format.decoding(found, cells))


class _Table(Source):
    """An Arrow table, or a pandas DataFrame."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        given = self._table
        table = (given if isinstance(given, pa.Table) else _from_pandas(given)).unify_dictionaries()
        units, digest = [len(table)], _digest(table)
        if shared is None:
            found: ArrowReader = Table(
                table=table, schema=table.schema, units=units, fingerprint=digest
            )
        else:
            path = shared / f"table-{name}.arrow"
            _write(table, path)
            found = TableFile(path=path, schema=table.schema, units=units, fingerprint=digest)
        checked = _checked(found)
        for column in table.column_names:
            if table[column].null_count:
                raise DataError(
                    f"column {column!r} has nulls ({table[column].null_count} of "
                    f"{len(table)} rows): a tensor has none. Leave those rows out, or fill them "
                    "before: df.fillna for a pandas DataFrame"
                )
        return checked


class Frame(Source):
    """A Spark DataFrame."""

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        from horovod_runner.data import staging

        if shared is None:
            return Spilled(name, staging.arrow_schema(self.frame))
        staged = staging.stage(self.frame, shared)
        if not staged.units:
            raise DataError("it has no rows")
        return staged


def source_of(value: object) -> Source | None:
    """The source that an argument of ``run`` is; None if it is something else."""
    if isinstance(value, Source):
        return value
    if isinstance(value, pa.Table):
        return _Table(value)
    module, name = f"{type(value).__module__}.", type(value).__qualname__
    if name == "DataFrame" and module.startswith("pandas."):  # pandas 3 has it in no submodule
        return _Table(value)
    if name == "DataFrame" and module.startswith("pyspark.sql."):
        return Frame(value)
    return None


def _from_pandas(frame: Any) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"the pandas DataFrame cannot be turned into columns of one type each: {error}. Leave "
            "those columns out, or turn them into numbers, lists of numbers, text or bytes first"
        ) from error


def frames_of(sources: Mapping[str, Source]) -> dict[str, DataFrame]:
    """The Spark DataFrames among sources."""
    return {name: source.frame for name, source in sources.items() if isinstance(source, Frame)}


def _checked(reader: ArrowReader) -> ArrowReader:
    """Name columns that cannot become tensors before anything is launched."""
    if not sum(reader.units):
        raise DataError("it has no rows")
    if not reader.columns:
        raise DataError("it has no columns")
    for name in reader.fill:
        if name not in reader.columns:
            raise DataError(f"fill names {name!r}; the columns are {', '.join(reader.columns)}")
        columns.check_fill(name, columns.leaves(reader.schema)[name], reader.fill[name])
    reader.settle(list(reader.columns))
    return reader


def _write(table: pa.Table, path: Path) -> None:
    try:
        check_room(path.parent, table.nbytes)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1 << 13)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from None


def _digest(table: pa.Table) -> str:
    import hashlib

    digest = hashlib.blake2b(repr((table.schema, len(table))).encode(), digest_size=8)
    for batch in table.to_batches():
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is not None:
                    digest.update(memoryview(buffer)[: 1 << 16])
    return digest.hexdigest()
