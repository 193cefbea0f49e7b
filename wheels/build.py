"""Builds one wheel for the environment that runs this, and writes it and its record to a folder.

It is kept in a cache of its own. What a user's cache has may have been built with other compilers,
flags and libraries than this environment's, which the record would name.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from horovod_runner import __version__
from horovod_runner.tools.horovod_build import toolchain
from horovod_runner.tools.horovod_build.build import build_wheel
from horovod_runner.tools.horovod_build.plan import make_plan
from horovod_runner.tools.horovod_build.release import release


def main() -> None:
    """Build, or take the wheel that was built here for the same versions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--frameworks", required=True)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    plan = make_plan(options.frameworks.split(","), options.gpu, "mpich")
    print(plan.describe(), flush=True)
    container = os.environ.get("WHEELS_CONTAINER") or None
    cuda = f"-cuda-{toolchain.cuda_version(plan.cuda_home)}" if plan.cuda_home else ""
    place = re.sub(r"[^\w.-]", "-", container or "none")
    shelf = options.cache / f"{place}{cuda}" / plan.key()
    shelf.mkdir(parents=True, exist_ok=True)
    built = sorted(shelf.glob("*.whl"))
    wheel = built[0] if built else build_wheel(plan, shelf, lambda line: print(line, flush=True))
    record = release(wheel, plan, options.out, runner=__version__, container=container)
    where = f"in {container}" if container else "in no container"
    print(f"{record.file}: {record.size / 2**20:.1f} MiB, glibc {record.glibc}, built {where}")


if __name__ == "__main__":
    main()
