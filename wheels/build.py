"""Builds one wheel for the environment that runs this, and writes it and its record to a folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from horovod_runner import __version__
from horovod_runner.commands.install import find_or_build_wheel
from horovod_runner.horovod_build.plan import make_plan
from horovod_runner.horovod_build.release import release


def main() -> None:
    """Build, or take the wheel from this user's cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frameworks", required=True)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    plan = make_plan(options.frameworks.split(","), options.gpu, "mpich")
    print(plan.describe(), flush=True)
    wheel = find_or_build_wheel(plan, say=lambda line: print(line, flush=True))
    container = os.environ.get("WHEELS_CONTAINER") or None
    record = release(wheel, plan, options.out, runner=__version__, container=container)
    where = f"in {container}" if container else "in no container"
    print(f"{record.file}: {record.size / 2**20:.1f} MiB, glibc {record.glibc}, built {where}")


if __name__ == "__main__":
    main()
