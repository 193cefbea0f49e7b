"""The datasets among the arguments of a run: found, looked at, and made ready on the driver.

Nothing here imports Arrow for a run that has none.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        data_dir: a folder that the driver and all executors share, if there is one.
    """

    sources: Mapping[str, Source]
    shards: Mapping[str, Any]
    data_dir: Path | None

    @contextmanager
    def prepared(self, job: Job, launcher: Launcher) -> Iterator[Job]:
        """The job with all that its ranks need to know of its datasets, while they are there.

        Raises:
            DataError: one cannot be read, or a column cannot become a tensor.
        """
        if not self.sources:
            yield job
            return
        from horovod_runner.data.sources import frames_of

        with ExitStack() as stack:
            shared = None
            if self.data_dir is not None or launcher.shares_files:
                shared = stack.enter_context(RunFolder(job.run_id, self.data_dir)).path
            readers = {name: source.prepare(name, shared) for name, source in self.sources.items()}
            if shared is None:
                launcher.frames = frames_of(self.sources)
            yield replace(job, data=pickle.dumps(readers))


def find_datasets(kwargs: Mapping[str, Any], data_dir: Path | None = None) -> Datasets:
    """The datasets among the arguments of a run."""
    candidates = {
        name: value
        for name, value in kwargs.items()
        if f"{type(value).__module__}.".startswith(_HOMES)
    }
    if not candidates:
        return Datasets({}, {}, data_dir)
    from horovod_runner.data.shard import Shard
    from horovod_runner.data.sources import source_of

    found = {name: source_of(value) for name, value in candidates.items()}
    sources = {name: source for name, source in found.items() if source is not None}
    return Datasets(sources, {name: Shard(name) for name in sources}, data_dir)
