"""Programs that drivers in pods run: ``programs.py NAME``."""

from __future__ import annotations

import os
import sys

from horovod_runner import ClusterConfig, HorovodRunner, SlotError
from tests.engines.programs import step_until_two_ranks_are_back, wait_in_the_first_attempt

SLOTS = ClusterConfig(slot_timeout=300, preload_frameworks=False)


def resume() -> None:
    """Save to a store, lose a pod, resume from the store."""
    import s3fs

    s3fs.S3FileSystem().mkdir("mine")
    runner = HorovodRunner(
        np=2, max_restarts=2, checkpoint_dir="s3://mine/run", cluster_config=SLOTS
    )
    print("resumed", runner.run(wait_in_the_first_attempt))


def grow() -> None:
    """Lose a pod of an elastic run and get another one."""
    runner = HorovodRunner(np=(1, 2), max_restarts=3, grow_after=0.0, cluster_config=SLOTS)
    sizes = runner.run(step_until_two_ranks_are_back)
    attempts = runner.last_run.attempts
    print("ranks: from", sizes[0], "to", sizes[-1], "in", len(attempts), "attempts")
    print("ends:", "; ".join(each.change or each.error or "finished" for each in attempts))


def count() -> None:
    """Run on the session that the settings describe, as a notebook does."""
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate():
        print("ranks", HorovodRunner(np=2, cluster_config=SLOTS).run(_size))


def refused() -> None:
    """Ask for more than the cluster has."""
    try:
        HorovodRunner(np=2, cluster_config=ClusterConfig(slot_timeout=20)).run(_size)
    except SlotError as error:
        print("refused:", " ".join(str(error).split()))


def _size() -> str:
    return os.environ["WORLD_SIZE"]


if __name__ == "__main__":
    # Functions of __main__ travel by value, as those of a user's script do.
    {"resume": resume, "grow": grow, "count": count, "refused": refused}[sys.argv[1]]()
