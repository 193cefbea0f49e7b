"""The datasets among the arguments of a run: found, looked at, and made ready on the driver.

Nothing here imports Arrow for a run that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from horovod_runner.errors import DataError, SerializationError
from horovod_runner.folder import RunFolder
from horovod_runner.job import Job
from horovod_runner.launchers import Launcher

if TYPE_CHECKING:
    from horovod_runner.data.sources import Source

# Modules whose objects may be datasets; what none of them has defined is none.
_HOMES = ("horovod_runner.data", "pyarrow.", "pandas.", "pyspark.sql.")


@dataclass(frozen=True)
class Datasets:
    """The datasets of one run.

    Attributes:
        sources: by the name of the argument.
        shards: what takes their place among the arguments.
    """

    sources: Mapping[str, Source]
    shards: Mapping[str, Any]

    @contextmanager
    def prepared(
        self,
        job: Job,
        launcher: Launcher,
        *,
        data_dir: Path | None = None,
        data_limit: int | None = None,
        ship_modules: Sequence[ModuleType] = (),
    ) -> Iterator[Job]:
        """The job with all that its ranks need to know of its datasets, while they are there.

        Args:
            job: what runs.
            launcher: says whether the ranks are on this machine.
            data_dir: a folder that the driver and all executors share, if there is one.
            data_limit: how many bytes datasets may take on a host; None: all but a reserve.
            ship_modules: as for :func:`~horovod_runner.job.make_job`.

        Raises:
            DataError: one cannot be read, or a column cannot become a tensor.
            SerializationError: one cannot be sent to the ranks.
        """
        if not self.sources:
            yield job
            return
        from horovod_runner import diagnosis
        from horovod_runner.data.sources import frames_of

        with ExitStack() as stack:
            shared = None
            if data_dir is not None or launcher.shares_files:
                shared = stack.enter_context(RunFolder(job.run_id, data_dir, limit=data_limit)).path
            readers = {name: source.prepare(name, shared) for name, source in self.sources.items()}
            if shared is None:
                launcher.frames = frames_of(self.sources)
            try:
                data = diagnosis.pickle_for_ranks(readers, ship_modules)
            except Exception as error:
                raise SerializationError(
                    f"the datasets {', '.join(readers)} are described to the ranks by pickle, and "
                    f"something in them cannot be pickled: {error}"
                ) from error
            if len(data) > diagnosis.MAX_BYTES:
                raise SerializationError(
                    f"the tables among {', '.join(readers)} take {diagnosis.bytes_text(len(data))}"
                    ", and a task can be sent 2 GB. Write them to Parquet files that the ranks can "
                    "read, or name a folder that the driver and all executors share: data_dir"
                )
            yield replace(job, data=data, data_limit=data_limit)


def find_datasets(kwargs: Mapping[str, Any]) -> Datasets:
    """The datasets among the arguments of a run.

    Raises:
        DataError: there is one, and what reads it is not installed.
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
            f"{', '.join(candidates)}: datasets take NumPy and pyarrow ({error}): "
            "pip install 'horovod_runner[data]'"
        ) from error
    found = {name: source_of(value) for name, value in candidates.items()}
    sources = {name: source for name, source in found.items() if source is not None}
    return Datasets(sources, {name: Shard(name) for name in sources})
