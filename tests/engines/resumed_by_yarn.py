"""A driver for `spark-submit --deploy-mode cluster`: it resumes in the second attempt of YARN's."""

from __future__ import annotations

import sys
import threading

from pyspark.sql import SparkSession

from horovod_runner import HorovodRunner, load_checkpoint, save_checkpoint


def resume_or_wait() -> str:
    """Save a checkpoint and wait for the end; or return what was saved."""
    import horovod.torch as hvd

    hvd.init()
    found = load_checkpoint()
    if found is not None:
        return f"resumed from step {found.step} with {sys.executable}"
    save_checkpoint({"weights": 7}, 3)
    threading.Event().wait()
    raise AssertionError("the wait has no end")


def main(folder: str) -> None:
    """Run it; the page of the run goes to HDFS, too."""
    spark = SparkSession.builder.getOrCreate()
    runner = HorovodRunner(np=2, checkpoint_dir=folder, resume=True)
    print(runner.run(resume_or_wait))
    runner.last_run.report(f"{folder}/page.html")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
