"""``horovod.spark.tensorflow.compute_worker``: ranks that serve data to a TensorFlow training.

    spark-submit .../frameworks/compute_worker.py CONFIG_FILE [--dispatchers 2]

The training reads the file that this program writes, and ends it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Start a rank on each slot of Spark, and wait until the training has no more need of them.

    It takes the command line's arguments, and returns the exit code.

    Raises:
        ValueError: the number of slots is not a multiple of the number of dispatchers.
    """
    from horovod.runner.common.service.compute_service import ComputeService
    from horovod.runner.common.util import secret
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn

    from horovod_runner.integrations.horovod_spark import launch
    from horovod_runner.launchers.sessions import find_session

    parser = argparse.ArgumentParser(prog="compute_worker", description=main.__doc__)
    parser.add_argument("configfile", help="the file to write for the training")
    parser.add_argument("--dispatchers", type=int, default=1, help="how many there are")
    parser.add_argument(
        "--dispatcher-side", default="compute", choices=("compute", "training"), help="their side"
    )
    given = parser.parse_args(arguments)
    spark, workers = find_session(), launch.cores()
    if workers % given.dispatchers:
        raise ValueError(
            f"--dispatchers={given.dispatchers} does not divide the {workers} slots of Spark into "
            "equal parts: choose a number that does"
        )
    key = secret.make_secret_key()
    service = ComputeService(given.dispatchers, workers // given.dispatchers, key=key)
    config = TfDataServiceConfig(
        dispatchers=given.dispatchers,
        workers_per_dispatcher=workers // given.dispatchers,
        dispatcher_side=given.dispatcher_side,
        addresses=service.addresses(),
        key=key,
    )
    config.write(given.configfile)
    signal.signal(signal.SIGTERM, lambda *_: spark.stop())
    try:
        launch.run(compute_worker_fn, (config,), num_proc=workers, verbose=0)
    finally:
        service.shutdown()
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
