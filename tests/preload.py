"""Ranks that are forked with the frameworks of a program, where a cold start is not the subject.

python tests/preload.py PROGRAM ARGUMENT... runs a Python program so, from the source of the program
and of the scripts among its arguments.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

#: Runs a Python program whose ranks are forked: what comes before its path.
WARM = (sys.executable, __file__)
#: A program that can follow it: this environment's ``horovod-runner``.
COMMAND = str(Path(sys.executable).parent / "horovod-runner")

#: What the modules of tests import, and so does a rank whose main is a function of one.
OF_TESTS = ("horovod_runner.run.runner", "pyarrow", "pytest")
#: What imports set: torch, Lightning, TensorFlow, h5py, OpenCV, and what brings an OpenMP.
SET_BY_IMPORTS = (
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "LD_LIBRARY_PATH",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TF2_BEHAVIOR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
)

#: What a rank that trains with torch imports.
TORCH = ("horovod.torch",)
#: What a rank that trains with Lightning imports, but for Lightning itself.
LIGHTNING = (*TORCH, "matplotlib.pyplot", "scipy.signal", "transformers")
#: For tests that train with Keras in one run and with Lightning in another one.
KERAS_AND_LIGHTNING = (*LIGHTNING, "keras", "horovod.tensorflow")
#: Variables of ranks whose runs share a fork server: any number of ranks has as many threads, and
#: scikit-learn sets the others in a process that imports it.
ALIKE = {
    "KMP_DUPLICATE_LIB_OK": "True",
    "KMP_INIT_AT_FORK": "FALSE",
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}

# What a program imports, by what it says.
_FRAMEWORKS = {
    r"\btorch\b": TORCH,
    r"\bimport lightning\b": LIGHTNING,
    r"import (keras|tensorflow)|\.keras\b": (
        "keras",
        f"horovod.{os.environ.get('KERAS_BACKEND', 'tensorflow')}",
    ),
    r"from transformers": (*TORCH, "transformers.trainer"),
}


def keras_on(backend: str) -> tuple[str, ...]:
    """What a rank that trains with Keras imports; to save a model, TensorFlow also on torch."""
    return ("keras", f"horovod.{backend}", "tensorflow")


def frameworks_of(code: str) -> tuple[str, ...]:
    """The frameworks that a program imports."""
    wanted = [names for said, names in _FRAMEWORKS.items() if re.search(said, code)]
    return tuple(dict.fromkeys(chain.from_iterable(wanted)))


def preload(frameworks: Iterable[str]) -> None:
    """From now on, fork the ranks of this process's runs from one that has imported them."""
    from horovod_runner import ClusterConfig

    option, chosen = "preload_frameworks", tuple(frameworks)
    inspect.unwrap(ClusterConfig.__init__).__kwdefaults__[option] = chosen
    # The command `horovod-runner run` gives the option itself, with this default.
    ClusterConfig.__dataclass_fields__[option].default = chosen


def preload_what_tests_import() -> None:
    """From now on, each fork server that this process starts imports it, too."""
    from horovod_runner.task.warm.client import ForkServer

    start = ForkServer._start

    def _start(self: ForkServer, name: str, modules: list[str]) -> None:
        start(self, name, [*dict.fromkeys((*modules, *OF_TESTS))])

    ForkServer._start = _start  # type: ignore[method-assign]


def without_what_imports_set(environment: Mapping[str, str]) -> None:
    """Give these variables the values that they had, or none.

    The fork servers of later runs would differ by them. With Lightning's, an import of Keras on
    torch asks which GPUs its process may see, so that it could not be preloaded.

    Args:
        environment: this process's before the imports.
    """
    for name in SET_BY_IMPORTS:
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]


def main() -> None:
    """Run the program that the command line names."""
    sys.argv[:] = sys.argv[1:]
    sources = [Path(word) for word in sys.argv if word == sys.argv[0] or word.endswith(".py")]
    sys.path[0] = str(sources[0].parent)
    preload(frameworks_of("\n".join(path.read_text() for path in sources)))
    atexit.register(gc.freeze)  # or the end of the interpreter would search for garbage
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
