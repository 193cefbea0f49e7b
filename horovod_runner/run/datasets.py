"""Finds the datasets among a run's arguments, and prepares them on the driver.

A run without datasets does not import Arrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from horovod_runner.common.options import Options
from horovod_runner.common.text import bytes_text
from horovod_runner.driver.launcher import Launcher
from horovod_runner.errors import CancelledError, DataError, SerializationError
from horovod_runner.host.scratch import RunFolder
from horovod_runner.wire.job import Job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.data.sources import Prepared, Source

_CANCELLED = "the run was cancelled while its datasets were prepared"
# Only objects of classes from these modules can be datasets.
_HOMES = ("horovod_runner.data", "pyarrow.", "pandas.", "pyspark.sql.")


@dataclass(frozen=True)
class Datasets:
    """The datasets of one run."""

    sources: Mapping[str, Source]
    shards: Mapping[str, Any]

    @contextmanager
    def prepared(
        self, job: Job, launcher: Launcher, options: Options, cancelled: Event
    ) -> Iterator[tuple[Job, Mapping[str, DataFrame]]]:
        """Yield the job with the readers of its datasets; their cached rows are removed on exit.

        Beside it, by dataset name, the DataFrames whose rows the launch has to send to the ranks:
        those of a run whose ranks share no folder with the driver.

        Raises:
            CancelledError: the run was cancelled.
            DataError: one cannot be read, or a column cannot become a tensor.
            SerializationError: one cannot be sent to the ranks.
        """
        if not self.sources:
            yield job, {}
            return
        from horovod_runner.data.sources import dataframes_of
        from horovod_runner.run import pickling

        config, ship_modules = options.data_config, options.cluster_config.ship_modules
        with ExitStack() as stack:
            shared = None
            dataframes: Mapping[str, DataFrame] = {}
            if config.shared_dir is not None or launcher.shares_files:
                parent = None if config.shared_dir is None else Path(config.shared_dir)
                folder = RunFolder(job.run_id, parent, limit=config.disk_limit)
                shared = stack.enter_context(folder).path
            # All of them before the first is read: they may be parts of one table.
            fixed = {name: source.fixed() for name, source in self.sources.items()}
            readers = replace(self, sources=fixed)._readers(shared, cancelled)
            if shared is None:
                dataframes = dataframes_of(fixed)
            try:
                data = pickling.pickle_for_ranks(readers, ship_modules)
            except Exception as error:
                raise SerializationError(
                    f"the readers of the datasets {', '.join(readers)} are sent to the ranks by "
                    f"pickle, and something in them cannot be pickled: {error}"
                ) from error
            if len(data) > pickling.MAX_BYTES:
                raise SerializationError(
                    f"the tables among {', '.join(readers)} take {bytes_text(len(data))}"
                    "; a task can receive at most 2 GB. Write them to Parquet files that the ranks "
                    "can read, or name a folder that the driver and all executors share: "
                    "data_config=DataConfig(shared_dir=...)"
                )
            yield replace(job, data=data), dataframes

    def _readers(self, shared: Path | None, cancelled: Event) -> dict[str, Prepared]:
        """What the ranks read each dataset with; see :meth:`prepared`."""
        from horovod_runner.common.spark_session import jobs_until
        from horovod_runner.data.sources import dataframes_of

        readers = {}
        try:
            with ExitStack() as stack:
                for spark in {each.sparkSession for each in dataframes_of(self.sources).values()}:
                    stack.enter_context(jobs_until(cancelled, spark))
                for name, source in self.sources.items():
                    if cancelled.is_set():
                        break
                    readers[name] = source.prepare(name, shared)
        except Exception as error:
            if not cancelled.is_set():
                raise
            raise CancelledError(_CANCELLED) from error
        if cancelled.is_set():
            raise CancelledError(_CANCELLED)
        return readers


def find_datasets(kwargs: Mapping[str, Any]) -> Datasets:
    """Find the datasets among the arguments of a run.

    Raises:
        DataError: there is one, and NumPy, pyarrow or what opens its URL is not installed.
    """
    candidates = {
        name: value
        for name, value in kwargs.items()
        if f"{type(value).__module__}.".startswith(_HOMES)
    }
    if not candidates:
        return Datasets({}, {})
    try:
        from horovod_runner.data.shard import Shard
        from horovod_runner.data.sources import source_of
    except ImportError as error:
        raise DataError(
            f"{', '.join(candidates)}: datasets require NumPy and pyarrow ({error}): "
            "pip install 'horovod_runner[data]'"
        ) from error
    sources_or_none = {name: source_of(value) for name, value in candidates.items()}
    sources = {name: source for name, source in sources_or_none.items() if source is not None}
    for name, source in sources.items():
        source.check(name)
    return Datasets(sources, {name: Shard(name) for name in sources})
