"""Sources: what a user can pass as a dataset, and how the driver prepares it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import pyarrow as pa

from horovod_runner.common.arguments import parameters_of, suggest_fields
from horovod_runner.common.spark_session import with_fixed_files
from horovod_runner.data.pack import arrow_rows
from horovod_runner.data.pack import columns as column_types
from horovod_runner.data.read import listing
from horovod_runner.data.read.files import check_reachable, connect
from horovod_runner.data.read.listing import Reading, ReadingArguments
from horovod_runner.data.read.readers import (
    ArrowReader,
    Deferred,
    Pieces,
    Reader,
    Table,
    TableFile,
    name_in_errors,
)
from horovod_runner.data.read.spill import Spilled
from horovod_runner.data.read.tables import digest, pandas_table, without_twins
from horovod_runner.errors import DataError
from horovod_runner.host.scratch import check_room

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Prepared: TypeAlias = Reader | Deferred
Location: TypeAlias = str | os.PathLike[str]  # a path, or a URL
# Arguments of other readers.
_ALIASES = {"schema_fields": "columns", "version_as_of": "version", "na_value": "fill_null"}
_EXAMPLES = 16  # rows that are kept of a table, for examples


class Source(ABC):
    """A description of a dataset; nothing is read before a run needs it.

    Attributes:
        shows_rows: whether :meth:`head` works.
    """

    shows_rows = True

    def prepare(self, name: str, shared: Path | None) -> Prepared:
        """Look at the data, on the driver.

        Args:
            name: the dataset's name in ``run``, for error messages.
            shared: a folder that this process and all ranks can read and write; None if there is
                none.

        Raises:
            DataError: the data cannot be read, or a column cannot become a tensor.
        """
        with name_in_errors(name):
            return self._prepare(name, shared)

    @abstractmethod
    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        """See :meth:`prepare`, which adds the name to errors."""

    def check(self, name: str) -> None:  # noqa: B027 - not all have files
        """Check that its files, if it has some, can be reached; does not look at them.

        Raises:
            DataError: a package or a setting for its URL is missing, or HDFS does not answer.
        """

    def for_examples(self) -> Source:
        """A source with the same first rows, which does not keep the others in memory."""
        return self

    def fixed(self) -> Source:
        """A source that has the rows of now in all attempts of a run."""
        return self

    def head(self, count: int) -> pa.RecordBatch:
        """The first rows, as examples; fewer if there are not as many.

        Raises:
            DataError: the data cannot be read, or there are no rows.
        """
        reader = self._prepare("", None)
        if not isinstance(reader, ArrowReader):
            raise DataError(f"{type(self).__name__} shows no rows outside a run")
        batches = reader.read(0, reader.schema.names)
        return next(batch for batch in batches if batch.num_rows).slice(0, count)


_OPTIONS = parameters_of(ReadingArguments, Reading)


class _Files(Source):
    """Files that the ranks read themselves."""

    _url: str  # or a path; of several the first
    _reading: Reading

    def check(self, name: str) -> None:
        with name_in_errors(name):
            check_reachable(self._url, self._reading.storage_options)


@suggest_fields(_ALIASES, options=_OPTIONS)
class parquet(_Files):  # noqa: N801 - reads as a call
    """Parquet files, which the ranks read themselves.

    Args:
        path: a file, a folder (Hive partitions become columns, in place of those that the files
            have by that name), a glob pattern, or several of these; on any filesystem of fsspec:
            ``s3://``, ``hdfs://``, ``gs://``, ``abfs://``.
        columns: columns to read; None for all.
        filter: rows to read: an expression of ``pyarrow.dataset``, or tuples as in
            ``pyarrow.parquet``: ``[("year", ">=", 2024)]``. None for all.
        fill_null: values that replace nulls, by column. None refuses nulls.
        ragged: list columns that are not vectors, even if their first rows have one length.
        storage_options: options for fsspec.

    Raises:
        ValueError: the list of paths is empty.
    """

    def __init__(
        self, path: Location | Sequence[Location], **options: Unpack[ReadingArguments]
    ) -> None:
        paths = [path] if isinstance(path, str | os.PathLike) else path
        self._paths = [os.fspath(each) for each in paths]
        if not self._paths:
            raise ValueError("parquet([]) names no path: give at least one")
        self._url = self._paths[0]
        self._reading = Reading(**options)

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        return _checked(listing.find(self._paths, self._reading), self._reading.columns)


@suggest_fields(_ALIASES, options=_OPTIONS)
class delta(_Files):  # noqa: N801 - reads as a call
    """A Delta table, which the ranks read themselves; requires deltalake.

    Deletion vectors are taken into account, and columns that were renamed, dropped or added; those
    are null in files that lack them. The version is fixed when the run
    begins: later changes are not seen.

    Args:
        path: the table's folder or URL.
        version: version of the table; None for the newest.
        options: those of :class:`parquet`; ``storage_options`` are for deltalake, too.
    """

    def __init__(
        self, path: Location, *, version: int | None = None, **options: Unpack[ReadingArguments]
    ) -> None:
        self._url = os.fspath(path)
        self._version = version
        self._reading = Reading(**options)

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        from horovod_runner.data.read import delta_table

        found = delta_table.find(self._url, self._version, self._reading)
        return _checked(found, self._reading.columns)


@suggest_fields(_ALIASES, options=_OPTIONS)
class petastorm(_Files):  # noqa: N801 - reads as a call
    """A Petastorm dataset, of ``materialize_dataset`` or ``make_spark_converter``.

    Its files are read without Petastorm, and cells of its codecs are decoded. Images whose size the
    Unischema states are decoded when they are packed; others stay encoded, see ``images`` of
    :meth:`Shard.batches`. Predicates, ngrams and transforms require Petastorm, with which each host
    reads the whole dataset once.

    Args:
        dataset: its path or URL, or what ``make_spark_converter`` returned.
        predicate: a predicate of ``petastorm.predicates``.
        ngram: a ``petastorm.ngram.NGram``; its columns are called "0.name", "1.name", ... by their
            distance in time.
        transform_spec: a ``petastorm.transform.TransformSpec``.
        options: those of :class:`parquet`; ``storage_options`` are for Petastorm, too. ``filter``
            and ``fill_null`` do not go together with the three above.

    Raises:
        ValueError: options exclude each other.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        predicate: Any = None,
        ngram: Any = None,
        transform_spec: Any = None,
        **options: Unpack[ReadingArguments],
    ) -> None:
        is_path = isinstance(dataset, str | os.PathLike)
        self._url = os.fspath(dataset) if is_path else dataset.cache_dir_url
        self._reading = Reading(**options)
        given = {"predicate": predicate, "transform_spec": transform_spec, "schema_fields": ngram}
        self._with_petastorm = {name: value for name, value in given.items() if value is not None}
        self.shows_rows = not self._with_petastorm
        if self._with_petastorm and self._reading.filter is not None:
            raise ValueError(
                "filter works only without Petastorm, and predicate, ngram and transform_spec "
                "only with it: pass one or the other"
            )
        if self._with_petastorm and self._reading.fill_null:
            raise ValueError(
                "fill_null has no effect on rows that Petastorm reads: replace nulls in "
                "transform_spec"
            )
        if ngram is not None and self._reading.columns is not None:
            raise ValueError("an ngram names its columns itself: leave columns out")

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        from horovod_runner.data.read import petastorm_format, petastorm_reader

        options = self._reading.storage_options
        filesystem, folder = connect(self._url, options)
        codecs = petastorm_format.codecs_of(filesystem, folder)
        if self._with_petastorm:
            plain = listing.find(self._url, Reading(storage_options=options))
            more = {"schema_fields": self._reading.columns, "storage_options": options}
            given = {key: value for key, value in more.items() if value is not None}
            return petastorm_reader.inspect(
                name,
                self._url,
                {**given, **self._with_petastorm},
                has_unischema=codecs is not None,
                groups=sum(len(groups) for part in plain.parts for _, groups in part),
            )
        files = listing.find(self._url, self._reading)
        # Without units there are no rows, which is refused below.
        reader = petastorm_format.decoding(files, codecs) if codecs and files.units else files
        return _checked(reader, self._reading.columns)


class _Table(Source):
    """An Arrow table, or a pandas DataFrame."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def for_examples(self) -> Source:
        if isinstance(self._table, pa.Table):
            return _Table(self._table.take(list(range(min(_EXAMPLES, len(self._table))))))
        return _Table(self._table.head(_EXAMPLES).copy())

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        given = self._table
        arrow = without_twins(given) if isinstance(given, pa.Table) else pandas_table(given)
        table = arrow.unify_dictionaries()
        nulls = {
            column: f"column {column!r} has nulls ({table[column].null_count} of {len(table)} "
            "rows), and a tensor cannot hold nulls. Leave those rows out, or fill them first: "
            "df.fillna for a pandas DataFrame"
            for column in table.column_names
            if table[column].null_count
        }
        table = table.replace_schema_metadata(column_types.refusing(table.schema, nulls).metadata)
        known: Any = {
            "schema": table.schema,
            "units": [len(table)],
            "fingerprint": digest(table),
        }
        if shared is None:
            return _checked(Table(table=table, **known))
        path = shared / f"table-{name}.arrow"
        _write(table, path)
        return _checked(TableFile(path=path, **known))


class DataFrameSource(Source):
    """A Spark DataFrame.

    Columns that are known to be read are refused before a launch where rows are packed before it.
    """

    def __init__(self, dataframe: DataFrame, columns: Iterable[str] = ()) -> None:
        self.dataframe = dataframe
        self._columns = list(columns)

    def fixed(self) -> Source:
        """See :class:`Source`."""
        return DataFrameSource(with_fixed_files(self.dataframe), self._columns)

    def head(self, count: int) -> pa.RecordBatch:
        """See :class:`Source`."""
        from horovod_runner.data.read import staging

        batch = staging.head(self.dataframe, count)
        if batch is None:
            raise DataError("it has no rows: check the query")
        return batch

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        from horovod_runner.data.read import staging

        if shared is None:
            return Spilled(name, staging.Readable.of(self.dataframe).schema)
        pieces = _with_rows(staging.stage(self.dataframe, shared))
        for column in self._columns:
            pieces.columns.find(column)
        return pieces


class Staged(Source):
    """Rows that were packed before the run, in a folder that the ranks can read."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def _prepare(self, name: str, shared: Path | None) -> Prepared:
        return _with_rows(self._pieces)


def _with_rows(pieces: Pieces) -> Pieces:
    if not pieces.units:
        raise DataError("it has no rows: check the query")
    return pieces


def source_of(value: object) -> Source | None:
    """The source for an argument of ``run``; None if it is not a dataset."""
    if isinstance(value, Source):
        return value
    if isinstance(value, pa.Table):
        return _Table(value)
    module, name = f"{type(value).__module__}.", type(value).__qualname__
    if name == "DataFrame" and module.startswith("pandas."):  # in pandas 3: of "pandas" itself
        return _Table(value)
    if name == "DataFrame" and module.startswith("pyspark.sql."):
        return DataFrameSource(value)
    return None


def dataframes_of(sources: Mapping[str, Source]) -> dict[str, DataFrame]:
    """The Spark DataFrames among sources."""
    return {
        name: source.dataframe
        for name, source in sources.items()
        if isinstance(source, DataFrameSource)
    }


def _checked(reader: ArrowReader, asked: Sequence[str] | None = None) -> ArrowReader:
    """Refuse what is known to fail before anything is launched.

    Only columns that are asked for already have to become tensors.
    """
    refused = column_types.refused_in(reader.schema)
    if not reader.schema.names and refused:
        raise DataError("; ".join(refused.values()))
    if not sum(reader.units):
        raise DataError("it has no rows: check its path and filter")
    if not reader.schema.names:
        raise DataError("it has no columns")
    arrow_rows.check_fill_nulls(reader.schema, reader.columns, reader.fill_null)
    reader.settle(list(asked or ()))
    return reader


def _write(table: pa.Table, path: Path) -> None:
    try:
        check_room(path.parent, table.nbytes)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1 << 13)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error}. Free space there, or choose another folder with "
            "TMPDIR or data_config=DataConfig(shared_dir=...)"
        ) from None
